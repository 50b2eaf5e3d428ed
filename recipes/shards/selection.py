"""Which documents of a folder of shards are trained on and which are held out."""

import hashlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .reader import TokenShards

if TYPE_CHECKING:
    import numpy as np

    from ..tokens.report import TokenizedData

_CHUNK = 1 << 20  # documents looked at in one go


class TokenDocuments(Sequence[dict[str, Any]]):
    """Some documents of a folder, in their order, kept as stretches of document numbers.

    As a sequence it gives rows of text, each decoded when it is asked for.
    """

    def __init__(self, shards: TokenShards, first: "np.ndarray[Any, Any]", last: "np.ndarray[Any, Any]") -> None:
        """
        Args:
            first, last: [stretches], documents `first` to `last` without the latter, ascending and apart.
        """
        import numpy as np

        self.shards, self.first, self.last = shards, first.astype(np.int64), last.astype(np.int64)
        self._before = np.concatenate([[0], np.cumsum(self.last - self.first)])

    def __len__(self) -> int:
        return int(self._before[-1])

    def number(self, index: int) -> int:
        """The number in the folder of the document at a place."""
        import numpy as np

        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        stretch = int(np.searchsorted(self._before, index, side="right")) - 1
        return int(self.first[stretch]) + index - int(self._before[stretch])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return {"text": self._tokenizer.decode(self.shards.document(self.number(index))[:-1].tolist())}

    @property
    def _tokenizer(self) -> Any:
        from ..models import read_tokenizer

        if not hasattr(self, "_read"):
            self._read = read_tokenizer(str(self.shards.tokenizer_folder))
        return self._read

    @property
    def digest(self) -> str:
        """Of the tokens of these documents, without reading them."""
        chosen = hashlib.sha256(self.shards.index.digest.encode("ascii"))
        for numbers in (self.first, self.last):
            chosen.update(numbers.astype("<i8").data)
        return chosen.hexdigest()

    def stretches(self) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
        """[stretches] where each begins among the folder's tokens, and its number of tokens."""
        starts = self.shards.starts(self.first)
        return starts, self.shards.starts(self.last) - starts

    def bounds(self) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
        """[documents] where each begins among the folder's tokens, and its number of tokens, the end included."""
        import numpy as np

        numbers = np.repeat(self.first - self._before[:-1], self.last - self.first) + np.arange(len(self))
        starts = self.shards.starts(numbers)
        return starts, self.shards.starts(numbers + 1) - starts

    def spread(self, count: int, tokens: int) -> list[dict[str, Any]]:
        """The beginnings as text of at most `count` documents that are spread evenly over all.

        Args:
            tokens: of a beginning.
        """
        count = min(count, len(self))
        numbers = [self.number(index * len(self) // count) for index in range(count)]
        openings = [self.shards.document(number)[:-1][:tokens].tolist() for number in numbers]
        return [{"text": self._tokenizer.decode(ids)} for ids in openings if len(ids) > 1]

    def prepared(self, *, max_length: int, packing: str, truncation: str) -> "TokenizedData":
        """The rows that training reads, see `rows.prepare`."""
        from .rows import prepare

        return prepare(self, max_length=max_length, packing=packing, truncation=truncation)


def everything(shards: TokenShards) -> TokenDocuments:
    import numpy as np

    return TokenDocuments(shards, np.array([0]), np.array([shards.documents]))


def hold_out(
    shards: TokenShards, fraction: float, seed: int, max_rows: int | None = None
) -> tuple[TokenDocuments, TokenDocuments]:
    """Documents to train on and documents held out, chosen by a hash of their number and the seed.

    A document keeps its side when the folder grows, and a smaller fraction holds out a part of what a larger one does.

    Args:
        max_rows: go on only until so many documents are to be trained on.
    """
    import numpy as np

    kept: list[Any] = []
    left = shards.documents if max_rows is None else max_rows
    for begin in range(0, shards.documents, _CHUNK):
        numbers = np.arange(begin, min(begin + _CHUNK, shards.documents))
        held = _mixed(numbers, seed) < np.uint64(int(fraction * 2**64))
        if (~held).sum() >= left:  # the last one is the one that makes it enough
            held = held[: int(np.flatnonzero(~held)[left - 1]) + 1]
        left -= int((~held).sum())
        kept.append(held)
        if not left:
            break
    sides = np.concatenate(kept)
    return _chosen(shards, ~sides), _chosen(shards, sides)


def sample(documents: TokenDocuments, count: int, seed: int) -> TokenDocuments:
    """So many of the documents, drawn at random, in their order."""
    import numpy as np

    chosen = sorted(random.Random(seed).sample(range(len(documents)), count))
    numbers = np.array([documents.number(index) for index in chosen], dtype=np.int64)
    return TokenDocuments(documents.shards, numbers, numbers + 1)


def _chosen(shards: TokenShards, mask: Any) -> TokenDocuments:
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return TokenDocuments(shards, edges[::2], edges[1::2])


def _mixed(numbers: Any, seed: int) -> Any:
    """A hash of each number: the finaliser of SplitMix64 (Steele, Lea and Flood 2014, section 4), twice."""
    import numpy as np

    def mix(z: Any) -> Any:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    gamma = np.uint64(0x9E3779B97F4A7C15)
    key = mix(np.array([seed % 2**64], dtype=np.uint64) + gamma)
    return mix((numbers.astype(np.uint64) + np.uint64(1)) * gamma ^ key)
