"""Sources -> rows in the canonical form of their format, all of a run of one kind."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from .builtin import BUILT_IN, Loaded
from .faults import BadRow, Skipped, clip, place
from .files import find_files, read_rows
from .formats import CHOSEN_HINT, SHAPES, Gather, Row, Shape, Unusable, hint
from .hub import hub_rows
from .messages import MESSAGES, not_used
from .python_rows import function_rows
from .report import DataReport, SourceReport
from .sources import Source, sources_of

# Faults of one file that are told at once, and how many rows behind the first one are looked at for more.
_TOLD, _LOOKED_AT = 5, 10_000
# Names of unused columns that are kept.
_IGNORED = 1000


class Converter:
    """The rows of one source as the recipe wants them.

    Raises:
        UserError: a format that the objective cannot use, or a column that is mapped to no name of ours.
    """

    def __init__(self, source: Source, accepts: Sequence[str] | None) -> None:
        self.source, self.accepts = source, accepts
        stated = {shape.also for shape in SHAPES if accepts is not None and shape.format in accepts}
        if accepts is not None and source.format not in ("auto", *accepts, *stated):
            raise UserError(
                f"{source.setting_of('format')}: the objective cannot use {source.format}, but {_either(accepts)}: set "
                "one of these, or another objective."
            )
        usable = [shape for shape in SHAPES if accepts is None or shape.format in accepts]
        self.shapes = [shape for shape in usable if shape.asked_for(source.format)]
        known = {name for shape in SHAPES for name in shape.columns}
        unknown = sorted(set(source.columns) - known)
        if unknown:
            raise UserError(
                f"{source.setting_of('columns')}: unknown name {clip(unknown)}. Known: {', '.join(sorted(known))}."
            )

    def wants(self, format_name: str) -> bool:
        return self.source.format in ("auto", format_name) and (self.accepts is None or format_name in self.accepts)

    def __call__(self, raw: Row) -> tuple[Shape, Row, set[str]]:
        """What a row was taken for, the row, and the names of what it holds beside.

        Raises:
            Unusable: the row cannot be used.
        """
        row, mapped = self._rename(raw)
        # A row may fit several forms (Alpaca files often hold a `text` too): the richest comes first, and
        # what the user mapped goes before all.
        fitting = [shape for shape in self.shapes if shape.fits(row)]
        if mapped:
            fitting = [shape for shape in fitting if mapped & shape.columns]
        if not fitting:
            raise Unusable(self._why_not(raw, row))
        shape = fitting[0]
        auto = self.source.format == "auto"
        if shape.format == "prompt-completion" and auto and isinstance(row.get("label"), bool):
            raise Unusable(
                "label says whether the completion is wanted (unpaired preference), and the objective does not heed "
                "it: set data.format: prompt-completion to train on every completion"
            )
        rest = set() if shape.keeps_rest else {str(n)[:40] for n in row.keys() - shape.columns}
        for name in MESSAGES & shape.columns & row.keys():
            rest |= not_used(row[name], name)
        return shape, shape.convert(row), rest

    def _why_not(self, raw: Row, row: Row) -> str:
        advice = hint(row, [shape.format for shape in self.shapes])
        if advice:
            return advice
        others = [shape.name for shape in SHAPES if shape.fits(row)]
        if self.source.format != "auto":
            found = f"does not fit {self.source.setting_of('format')} {self.source.format}"
        elif others and others[0] not in [shape.name for shape in self.shapes]:
            found = f"is {others[0]}, which the objective cannot use"
        else:
            found = "fits no known format"
        expected = "; or ".join(" and ".join(shape.keys) for shape in self.shapes)
        return f"{found}: found the keys {clip(raw)}; expected {expected} (data.columns maps other names to these)"

    def _rename(self, raw: Row) -> tuple[Row, set[str]]:
        taken: set[str] = set()
        mapped: Row = {}
        for ours, theirs in self.source.columns.items():
            # `translation.en`: a field of an object, unless a column is called so.
            name, dot, inner = (theirs, "", "") if theirs in raw else theirs.partition(".")
            found = raw.get(name) if dot else raw
            if not isinstance(found, dict) or (inner if dot else name) not in found:
                setting = self.source.setting_of("columns")
                raise Unusable(f"has no column {theirs!r} ({setting}.{ours}): found {clip(raw)}")
            taken.add(name)
            mapped[ours] = found[inner if dot else name]
        return {name: value for name, value in raw.items() if name not in taken} | mapped, set(mapped)


class _Part(NamedTuple):
    """A file, or what stands for one: its faults are told together."""

    name: str
    rows: Iterator[tuple[int, dict[str, Any] | BadRow]]


class Reader:
    """Reads sources one after another and holds them to one kind of row.

    Args:
        accepts: formats that the objective can use; None for all.
        report: gets what is read.
    """

    def __init__(self, accepts: Sequence[str] | None, report: DataReport) -> None:
        self.accepts, self.report = accepts, report
        self.converters: dict[str, Converter] = {}
        self.files: dict[str, list[Path]] = {}
        self.named: dict[str, str] = {}  # file or built-in data set -> the setting that names it
        self.ignored: set[str] = set()
        self.kind: tuple[str, str] | None = None  # of the first row; all must be of it
        self.first = ""  # the place of that row
        self.forms: list[str] = []

    def open(self, value: Any, setting: str, section: Any) -> list[Source]:
        """The sources that a recipe's value names, each file in one of them.

        Raises:
            UserError: a source that is not there, or that `data.source` names already.
        """
        opened = []
        for source in sources_of(value, setting, section):
            self.converters[source.setting] = Converter(source, self.accepts)
            if source.kind == "built-in":
                self._check_built_in(source)
                self._name(" ".join([source.where, *map(str, sorted(source.arguments.items()))]), source)
            elif source.kind == "files":
                files = [f for f in find_files(source.where, source.setting) if self._name(str(f.resolve()), source, f)]
                if not files:
                    continue
                self.files[source.setting] = files
            opened.append(source)
        return opened

    def _name(self, thing: str, source: Source, shown: Path | None = None) -> bool:
        """Whether a file or data set is read here: plain names of a file that is read already are passed over."""
        before = self.named.setdefault(thing, source.setting)
        if before == source.setting:
            return True
        if source.setting.startswith("data.eval_source"):
            if before.startswith("data.eval_source"):
                return False
            raise UserError(
                f"{source.setting}: {shown or source.where} is named in data.source too; its rows would be trained on."
            )
        if source.kind == "built-in":
            raise UserError(f"{source.setting}: {source.where} is named in {before} already.")
        return bool(source.own)

    # Built-in data sets

    def _check_built_in(self, source: Source) -> None:
        data = BUILT_IN[source.where]
        if source.format != "auto" and source.format not in data.formats:
            raise UserError(f"{source.setting_of('format')}: {data.name} is {data.format}, not {source.format}.")
        # The section's columns are for the files beside it; alone it has nothing that they could be for.
        if source.columns and ("columns" in source.own or source.setting == "data.source"):
            raise UserError(f"{source.setting_of('columns')}: {data.name} has no columns to rename.")

    def built_in(self, source: Source, report: SourceReport) -> Loaded:
        """The rows of a built-in data set, with the group of each.

        Raises:
            UserError: it cannot be had, or the objective cannot use it.
        """
        data, converter = BUILT_IN[source.where], self.converters[source.setting]
        usable = [name for name in data.formats if converter.wants(name)]
        asked = source.format != "auto" or data.format != "preference"
        wanted = next((name for name in usable if asked or name != "prompt-completion"), None)
        if wanted is None:
            raise UserError(
                f"{source.setting}: {data.name} is {data.format}, which the objective cannot use"
                f"{CHOSEN_HINT if usable else f': it takes {_either(self.accepts or ())}'}."
            )
        try:
            loaded = data.load(**source.arguments)
        except UserError as error:
            raise type(error)(f"{source.setting}: {data.name}: {error}") from error
        shape = next(shape for shape in SHAPES if shape.format == wanted and shape.fits(loaded.rows[0]))
        self._settle(shape, shape.convert(loaded.rows[0]), data.name, report)
        report.rows_read += len(loaded.rows) + len(loaded.skipped)
        self.report.rows_read += len(loaded.rows) + len(loaded.skipped)
        report.skipped += len(loaded.skipped)
        for skipped in loaded.skipped:
            self.report.skip(skipped)
        rows = loaded.rows if wanted == data.format else [shape.convert(row) for row in loaded.rows]
        return Loaded(rows, loaded.groups)

    # All others

    def rows(self, source: Source, report: SourceReport, names: list[str], *, streaming: bool = False) -> Iterator[Row]:
        """The usable rows of a source that is none of ours.

        Args:
            names: gets the name of each file that is begun.

        Raises:
            UserError: rows that cannot be used, unless they are to be skipped.
        """
        gathered: dict[Gather, list[Row]] = {}
        for part in self._parts(source, streaming):
            names.append(part.name)
            for shape, row in self._part(part, source, report):
                if shape.gather is None:
                    yield row
                elif not streaming:
                    gathered.setdefault(shape.gather, []).append(row)
                elif shape.whole:
                    yield from self._gathered(shape.gather, [row])
                else:
                    raise UserError(
                        f"{source.setting}: answers in rows of their own are gathered by prompt, for which all rows "
                        "are read first: remove data.streaming, or give a row all answers to its prompt."
                    )
        for gather, rows in gathered.items():
            yield from self._gathered(gather, rows)

    def _gathered(self, gather: Gather, rows: list[Row]) -> list[Row]:
        """Rows in the format that was asked for, made of several."""
        found, left_out = gather(rows)
        for cause, count in left_out.items():
            self.report.left_out[cause] = self.report.left_out.get(cause, 0) + count
        return found

    def nothing_found(self, setting: str, names: Sequence[str]) -> UserError:
        """That none of these files held a usable row."""
        shown = f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        skipped = [skipped for skipped in self.report.skipped if skipped.file in names]
        first = f", the first at {place(skipped[0].file, skipped[0].line)}: {skipped[0].reason}" if skipped else ""
        if self.report.left_out:
            causes = ", ".join(f"{count} {cause}" for cause, count in self.report.left_out.items())
            return UserError(f"{setting}: no pair in {shown}: {causes}.")
        return UserError(f"{setting}: no usable row in {shown}: {len(skipped)} skipped{first}.")

    def _parts(self, source: Source, streaming: bool) -> Iterator[_Part]:
        if source.kind == "hub":
            yield _Part(f"{source.name}, split {source.split}", hub_rows(source, streaming=streaming))
        elif source.kind == "python":
            yield _Part(source.where, function_rows(source))
        else:
            yield from (_Part(str(file), read_rows(file)) for file in self.files[source.setting])

    def _part(self, part: _Part, source: Source, report: SourceReport) -> Iterator[tuple[Shape, Row]]:
        converter, faults, until = self.converters[source.setting], _Faults(source), 0
        for number, (line, raw) in enumerate(part.rows):
            report.rows_read += line > 0
            self.report.rows_read += line > 0
            try:
                if isinstance(raw, BadRow):
                    raise Unusable(raw.reason)
                shape, row, rest = converter(raw)
                faults.settle(lambda: self._settle(shape, row, place(part.name, line), report))  # noqa: B023
            except Unusable as fault:
                if source.on_bad_row == "skip":
                    report.skipped += 1
                    self.report.skip(Skipped(part.name, line, str(fault)))
                    continue
                # `datasets` turns what looks like a date in JSON or CSV into a timestamp.
                turned = source.kind == "hub" and "a timestamp" in str(fault)
                remedy = " (if it is text on the Hub: download the file and give its path)" if turned else ""
                faults.add(part.name, line, f"{fault}{remedy}")
                until = until or number + _LOOKED_AT
            else:
                if len(self.ignored) < _IGNORED:
                    self.ignored |= rest
                if not faults:
                    yield shape, row
            if faults and (len(faults) == _TOLD or number >= until):
                break
        faults.tell()

    def _settle(self, shape: Shape, converted: Row, where: str, report: SourceReport) -> None:
        """The first row says what all must be."""
        recognised = shape.describe(converted)
        kind = self._kind(shape, converted)
        if self.kind is None:
            self.kind, self.first, self.report.format = kind, where, shape.format
        elif kind != self.kind:
            raise UserError(
                f"{where}: this row is {recognised}, but {self.first} is "
                f"{self.report.recognised}. All rows of a run must have one format: "
                "separate them, or set data.format and data.columns."
            )
        if recognised not in self.forms:
            self.forms.append(recognised)
            self.report.recognised = " and ".join(self.forms)
        if recognised not in report.forms:
            report.forms.append(recognised)

    def _kind(self, shape: Shape, converted: Row) -> tuple[str, str]:
        """What all rows of a run have in common: the format, and of what its parts are."""
        if shape.format in ("classification", "token-classification"):
            return shape.format, shape.describe(converted)
        chat = isinstance(converted.get("prompt"), list) or "messages" in converted
        if chat and shape.format in ("messages", "prompt-completion"):
            # Both are conversations; an objective that reads both tells them apart row by row.
            both = self.accepts is None or {"messages", "prompt-completion"} <= set(self.accepts)
            return ("a conversation" if both else shape.format), "messages"
        return shape.format, "messages" if chat else "text"


class _Faults:
    """The first faults of a file, told together."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.found: dict[str, list[tuple[str, int]]] = {}  # reason -> places

    def __len__(self) -> int:
        return sum(map(len, self.found.values()))

    def add(self, name: str, line: int, reason: str) -> None:
        self.found.setdefault(reason, []).append((name, line))

    def settle(self, settle: Any) -> None:
        """A row of another kind ends the reading at once; what was found before it is told first."""
        try:
            settle()
        except UserError as error:
            raise UserError("\n".join([*self._lines(), str(error)])) from None

    def tell(self) -> None:
        """Raises:
        UserError: there are faults.
        """
        if not self:
            return
        lines = self._lines()
        skip = f"({self.source.setting_of('on_bad_row')}: skip leaves such rows out.)"
        if not any(line for places in self.found.values() for _, line in places):  # whole files, as empty ones
            raise UserError("\n".join(lines))
        if len(self) == _TOLD:
            lines.append(f"Reading stopped at the {_TOLD}th unusable row; there may be more. {skip}")
        else:
            lines[-1] += f" {skip}"
        raise UserError("\n".join(lines))

    def _lines(self) -> list[str]:
        lines = []
        for reason, (first, *others) in self.found.items():
            same = f" The same in {', '.join(str(line) for _, line in others)}." if others else ""
            lines.append(f"{place(*first)}: {reason}.{same}")
        return lines


def _either(formats: Sequence[str]) -> str:
    *most, last = formats
    return f"{', '.join(most)} or {last}" if most else last
