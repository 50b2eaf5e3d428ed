"""Documents of text, one after another, without holding more than one file's worth of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from .builtin import BUILT_IN, BuiltIn
from .files import BadRow, Skipped, clip, find_files, place, read_rows
from .formats import SHAPES, Row, Unusable

_TEXT = next(shape for shape in SHAPES if shape.format == "text")


class Document(NamedTuple):
    """One text, and how long it is in UTF-8."""

    text: str
    size: int


class Corpus:
    """The documents of files, globs and built-in data sets, in the order in which they are named.

    JSON lines and Parquet are read row by row; a text file is one document.

    Attributes:
        counts: (file or origin, documents) of what has been read to its end, filled while the corpus is iterated.
        skipped: rows left out under `skip`, with file, line and reason.
    """

    def __init__(self, sources: Sequence[str], *, column: str = "text", skip: bool = False) -> None:
        """
        Args:
            column: where rows keep their text.
            skip: leave out rows that cannot be used, and count them.

        Raises:
            UserError: a source that is not there or cannot be read.
        """
        self.column, self.skip = column, skip
        self.counts: list[tuple[str, int]] = []
        self.skipped: list[Skipped] = []
        self.parts: list[Path | BuiltIn] = []
        seen: set[Path | str] = set()
        for name in sources:
            found = [self._built_in(name)] if name in BUILT_IN and not Path(name).exists() else self._files(name)
            for part in found:
                key = part.name if isinstance(part, BuiltIn) else part.resolve()
                if key not in seen:
                    seen.add(key)
                    self.parts.append(part)

    def _files(self, name: str) -> list[Path]:
        try:
            return find_files(name, "SOURCE")
        except UserError as error:
            if not Path(name).suffix and "no file matches" in str(error):
                texts = ", ".join(data.name for data in BUILT_IN.values() if "text" in data.formats)
                raise UserError(f"{error} Built-in data sets of texts: {texts}.") from error
            raise

    def _built_in(self, name: str) -> BuiltIn:
        data = BUILT_IN[name]
        if "text" not in data.formats:
            texts = ", ".join(other.name for other in BUILT_IN.values() if "text" in other.formats)
            raise UserError(f"SOURCE: {name} is {data.format}, not text. Built-in data sets of texts: {texts}.")
        return data

    def __iter__(self) -> Iterator[Document]:
        """
        Raises:
            UserError: a row that cannot be used, with file, line and reason, or not one document in all.
        """
        self.counts, self.skipped = [], []
        for part in self.parts:
            count = 0
            for line, raw in self._rows(part):
                where = place(part, line) if isinstance(part, Path) else part.name
                try:
                    yield self._document(raw)
                    count += 1
                except Unusable as fault:
                    if not self.skip:
                        raise UserError(f"{where}: {fault}. (--on-bad-row skip leaves such rows out.)") from None
                    self.skipped.append(Skipped(where, line, str(fault)))
            self.counts.append((part.origin if isinstance(part, BuiltIn) else str(part), count))
        if not sum(count for _, count in self.counts):
            names = ", ".join(name for name, _ in self.counts)
            first = f", the first: {self.skipped[0].file}: {self.skipped[0].reason}" if self.skipped else ""
            raise UserError(f"no document in {names}: {len(self.skipped)} rows left out{first}")

    def _rows(self, part: Path | BuiltIn) -> Iterator[tuple[int, Row | BadRow]]:
        if isinstance(part, Path):
            yield from read_rows(part)
        else:
            yield from ((0, {self.column: row["text"]}) for row in part.load().rows)

    def _document(self, raw: Row | BadRow) -> Document:
        if isinstance(raw, BadRow):
            raise Unusable(raw.reason)
        if self.column not in raw:
            raise Unusable(f"has no column {self.column!r} (--column): found {clip(raw)}")
        text = _TEXT.convert({"text": raw[self.column]})["text"]
        return Document(text, len(text.encode("utf-8")))
