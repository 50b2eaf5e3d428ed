"""Rows that are read anew each time they are gone through, so that they are never all in memory."""

import hashlib
import heapq
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from .builtin import Loaded, in_held_out_part
from .holding import prompt_key
from .reader import Reader
from .report import DataReport, SourceReport
from .sources import Source

Row = dict[str, Any]

# Held-out rows are in memory: so many where the recipe does not say.
HELD_OUT = 1000
_STEADY = "files must not change during a run, and a function must give the same rows each time"


class RowStream:
    """The training rows of a stream; each iteration reads the sources from their beginning.

    Args:
        rows: begins to read them, those of one source where its number is given.
        sizes: rows of each source, as the first reading found them.
        digest: of all rows in their order.

    Raises:
        UserError: while they are read, as where the sources hold another number of rows than at first.
    """

    def __init__(
        self, rows: Callable[[int | None], Iterator[Row]], sizes: Sequence[int], digest: bytes, only: int | None = None
    ) -> None:
        self._rows, self.sizes, self.digest, self._only = rows, list(sizes), digest, only

    def parts(self) -> list["RowStream"]:
        """The rows of each source by themselves."""
        return [RowStream(self._rows, [size], self.digest, number) for number, size in enumerate(self.sizes)]

    def __len__(self) -> int:
        return sum(self.sizes)

    def __iter__(self) -> Iterator[Row]:
        count, digest = 0, hashlib.blake2b(digest_size=16)
        for count, row in enumerate(self._rows(self._only), 1):  # noqa: B007
            digest.update(_content(row))
            yield row
        if count != len(self):
            raise UserError(
                f"data.source: gives {count:,} rows to train on, and gave {len(self):,} when it was first "
                f"read: {_STEADY}"
            )
        if self._only is None and digest.digest() != self.digest:
            raise UserError(f"data.source: gives other rows to train on than when it was first read: {_STEADY}")


def _content(row: Row) -> bytes:
    return json.dumps(row, sort_keys=True, default=str).encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class _Sided:
    source: int
    held: bool
    row: Row


class Streamed:
    """Reads a recipe's sources as a stream.

    Args:
        section: the recipe's `data` section.
        sources: what `reader` opened.
        fraction: share of the prompts to hold out, chosen by their hash.
    """

    def __init__(self, section: Any, reader: Reader, sources: Sequence[Source], fraction: float) -> None:
        self.section, self.reader, self.sources, self.fraction = section, reader, sources, fraction
        self.built_in: dict[str, Loaded] = {}
        # A prompt of a built-in data set is where its group is, also in other sources.
        self.decided: dict[str, bool] = {}
        self.sizes: list[int] = []  # training rows of each source, once they are counted

    def first_pass(self, report: DataReport, known: set[str]) -> tuple[RowStream, list[Row], int]:
        """Read everything once: counts, faults, held-out rows and the digest.

        Args:
            known: prompts held out by `data.eval_source`.

        Returns:
            The rows to train on, those held out, and how many of `known` are trained on.
        """
        parts = [SourceReport(source.name) for source in self.sources]
        report.by_source = parts
        for source, part in zip(self.sources, parts, strict=True):
            if source.kind == "built-in":
                self._load(source, part)
        digest, met = hashlib.blake2b(digest_size=16), set()
        limit = self.section.max_eval_rows or HELD_OUT
        held: list[tuple[int, int, Row]] = []  # the rows with the smallest hashes, the largest of them first
        names: list[str] = []
        for number, found in enumerate(self._sided(self.reader, parts, names)):
            if not found.held:
                parts[found.source].rows_train += 1
                digest.update(_content(found.row))
                if known and (key := prompt_key(found.row)) in known:
                    met.add(key)
                continue
            parts[found.source].rows_eval += 1
            draw = hashlib.blake2b(f"{self.section.seed}:{number}".encode(), digest_size=8).digest()
            heapq.heappush(held, (-int.from_bytes(draw, "big"), number, found.row))
            if len(held) > limit:
                heapq.heappop(held)
        report.sources = names
        kept = [row for _, _, row in sorted(held, key=lambda item: item[1])]
        self.sizes = [part.rows_train for part in parts]
        stream = RowStream(self._train, self.sizes, digest.digest())
        if not len(stream) and not kept:
            raise self.reader.nothing_found("data.source", names)
        if not len(stream) or (self.fraction and not kept):
            raise UserError(
                f"data.eval_fraction = {self.fraction} with data.seed = {self.section.seed} leaves {len(stream)} rows "
                f"to train on and {len(kept)} held out: of a stream, prompts are chosen by their hash. Choose another "
                "fraction, or name a file in data.eval_source."
            )
        return stream, kept, len(met)

    def _load(self, source: Source, part: SourceReport) -> None:
        loaded = self.built_in[source.setting] = self.reader.built_in(source, part)
        capped = source.max_rows or self.section.max_rows
        if capped:  # the first rows would be those of a few groups
            order = random.Random(self.section.seed).sample(range(len(loaded.rows)), len(loaded.rows))
            loaded.rows = [loaded.rows[index] for index in order]
            loaded.groups = [loaded.groups[index] for index in order]
        for row, group in zip(loaded.rows, loaded.groups, strict=True):
            self.decided.setdefault(prompt_key(row), self._hashed(group))

    def _hashed(self, name: str) -> bool:
        return in_held_out_part(name, eval_fraction=self.fraction, seed=self.section.seed)

    def _train(self, only: int | None) -> Iterator[Row]:
        if only is not None and not self.sizes[only]:
            return
        again = Reader(self.reader.accepts, DataReport())
        again.converters, again.files = self.reader.converters, self.reader.files
        parts = [SourceReport(source.name) for source in self.sources]
        yield from (found.row for found in self._sided(again, parts, [], only) if not found.held)

    def _sided(
        self, reader: Reader, parts: Sequence[SourceReport], names: list[str], only: int | None = None
    ) -> Iterator[_Sided]:
        """The rows of all sources in their order, or of one, up to the limits of each and of all."""
        total = 0
        for number, (source, part) in enumerate(zip(self.sources, parts, strict=True)):
            taken = 0
            if only is not None and number != only:
                total += self.sizes[number]
                continue
            if total == self.section.max_rows:
                part.not_read = "not read, as data.max_rows was reached"
                continue
            if source.setting in self.built_in:
                rows = iter(self.built_in[source.setting].rows)
                names.append(source.where)
            else:
                rows = reader.rows(source, part, names, streaming=True)
            for row in rows:
                held = self.fraction > 0 and self._held(row)
                yield _Sided(number, held, row)
                taken, total = taken + (not held), total + (not held)
                if source.max_rows == taken or self.section.max_rows == total:
                    break

    def _held(self, row: Row) -> bool:
        key = prompt_key(row)
        return self.decided[key] if key in self.decided else self._hashed(key)
