"""How many rows of each source an epoch holds, and which."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any


class Mixture:
    """Epochs of rows from several sources, in the ratio of given weights.

    A source of n rows that gives k of them an epoch gives every row k // n times, and k % n rows once more. Those are
    drawn without replacement, and drawn on from where the epoch before stopped: after any number of epochs two rows of
    a source have been given equally often, or one of them once more.

    Args:
        sizes: training rows of each source.
        weights: of each source, positive; None for the sizes themselves, so that every row comes once.
        epoch_rows: rows of an epoch; None for as many as all sources have together.
        seed: of the draws.

    Raises:
        ValueError: no rows, or weights that are not positive numbers, one a source.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float] | None = None, epoch_rows: int | None = None, seed: int = 0
    ) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"every source needs a row, found {list(sizes)}")
        shares = list(sizes if weights is None else weights)
        if len(shares) != len(sizes) or not all(0 < share < math.inf for share in shares):
            raise ValueError(f"needs {len(sizes)} weights above 0, found {shares}")
        if epoch_rows is not None and epoch_rows < 1:
            raise ValueError(f"epoch_rows must be at least 1, found {epoch_rows}")
        self.sizes, self.seed = list(sizes), seed
        self._given: dict[str, Any] = {"weights": weights, "epoch_rows": epoch_rows, "seed": seed}
        self.rows_per_epoch = _apportioned(shares, sum(sizes) if epoch_rows is None else epoch_rows)

    def resized(self, sizes: Sequence[int]) -> "Mixture":
        """The same weights for other numbers of rows."""
        return Mixture(sizes, **self._given)

    def __len__(self) -> int:
        return sum(self.rows_per_epoch)

    @cached_property
    def _starts(self) -> list[int]:
        return [sum(self.sizes[:source]) for source in range(len(self.sizes))]

    def epoch(self, number: int) -> list[int]:
        """The rows of an epoch, counted from 0, as ascending places in the rows of all sources one after another; a
        row that comes several times stands there several times."""
        import numpy as np

        found: list[int] = []
        for source, (size, count, start) in enumerate(zip(self.sizes, self.rows_per_epoch, self._starts, strict=True)):
            times = np.full(size, count // size, dtype=np.int64)
            if extra := count % size:
                times[self._drawn(source, extra, number)] += 1
            found += np.repeat(np.arange(start, start + size), times).tolist()
        return found

    def _drawn(self, source: int, count: int, epoch: int) -> Any:
        """The `count` rows of a source that come once more in this epoch."""
        import numpy as np

        size = self.sizes[source]
        if 2 * count <= size:
            return self._window(source, count, epoch)
        # More than half: those that are left out go through permutations instead.
        left = np.ones(size, dtype=bool)
        left[self._window(source, size - count, epoch)] = False
        return np.flatnonzero(left)

    def _window(self, source: int, count: int, epoch: int) -> Any:
        """Places `epoch * count` and following of an endless row of permutations, at most half a permutation long."""
        import numpy as np

        size, first = self.sizes[source], epoch * count
        block, offset = divmod(first, size)
        ordered = self._permutation(source, count, block)
        if offset + count <= size:
            return ordered[offset : offset + count]
        return np.concatenate([ordered[offset:], self._permutation(source, count, block + 1)[: offset + count - size]])

    def _permutation(self, source: int, count: int, block: int) -> Any:
        """One permutation, which begins with none of the rows that end the one before it in the same window.

        Its own end is that of a permutation that depends on `block` alone, so that no earlier one needs to be known.
        """
        import numpy as np

        size = self.sizes[source]
        base = self._random(source, block)
        shared = block * size % count  # rows that the window across its beginning takes of the permutation before
        if not shared:
            return base
        end = size - (block + 1) * size % count
        body, tail = base[:end], base[end:]
        before = self._random(source, block - 1)[size - shared :]
        free = np.flatnonzero(~np.isin(body, before))[: count - shared]
        return np.concatenate([body[free], np.delete(body, free), tail])

    def _random(self, source: int, block: int) -> Any:
        import numpy as np

        return np.random.default_rng([self.seed, source, block]).permutation(self.sizes[source])


def _apportioned(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in the ratio of the shares that come to the total: the largest remainders are rounded up."""
    largest = max(shares)
    parts = [share / largest for share in shares]  # the sum of the shares themselves may be beyond all numbers
    whole = sum(parts)
    exact = [part / whole * total for part in parts]
    counts = [math.floor(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
    for source in order[: total - sum(counts)]:
        counts[source] += 1
    return counts
