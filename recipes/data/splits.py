"""Training and held-out rows, from files or from a built-in data set.

Every row comes out in the canonical form of its format, see `formats`. A row that cannot be used is an error with
file, line and reason, or is counted and listed; a reason never quotes the row's content.
"""

import difflib
import hashlib
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import UserError
from .builtin import BUILT_IN, BuiltIn, Loaded, in_held_out_part
from .files import BadRow, Skipped, clip, find_files, place, read_rows
from .formats import CHOSEN_HINT, SHAPES, Row, Shape, Unusable, hint


class DataSection(Protocol):
    """What is read of a recipe's `data` section."""

    @property
    def source(self) -> Any: ...  # a name in BUILT_IN, or a path, a glob, or a list of them
    @property
    def format(self) -> str: ...  # auto, or one of formats.FORMATS
    @property
    def columns(self) -> dict[str, str]: ...  # our name -> the file's column
    @property
    def on_bad_row(self) -> str: ...  # error | skip
    @property
    def max_rows(self) -> int | None: ...  # at most this many training rows
    @property
    def eval_source(self) -> Any: ...  # as source
    @property
    def eval_fraction(self) -> float: ...  # 0 holds nothing out
    @property
    def max_eval_rows(self) -> int | None: ...
    @property
    def seed(self) -> int: ...


@dataclass
class DataReport:
    """What was read and what became of it.

    Attributes:
        format: the format of the rows that come out, one of `formats.FORMATS`.
        recognised: what the rows were taken for, e.g. "Alpaca (instruction, input, output)".
        sources, eval_sources: the files read, in order, or the origin of a built-in data set.
        rows_read: rows found in all files, those skipped included.
        skipped: (file, line, reason) of each row left out under `on_bad_row: skip`.
        left_out: cause -> number of prompts whose scored answers make no pair.
        rows_train, rows_eval: rows that came out.
        split: how the held-out rows were chosen, in words.
        ignored_columns: names in the rows that were not used.
        warnings: what the user ought to know, such as held-out prompts that are trained on.
    """

    format: str = ""
    recognised: str = ""
    sources: list[str] = field(default_factory=list)
    eval_sources: list[str] = field(default_factory=list)
    rows_read: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    rows_train: int = 0
    rows_eval: int = 0
    split: str = ""
    ignored_columns: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def rows_skipped(self) -> int:
        return len(self.skipped)


@dataclass
class Splits:
    """Rows to train on and rows held out, each a list of plain dicts, and the report on both."""

    train: list[Row]
    eval: list[Row]
    report: DataReport


def load_splits(section: DataSection, accepts: Sequence[str] | None = None) -> Splits:
    """Read the rows that a recipe's `data` section names and hold a part out.

    The held-out part is what `eval_source` names; of a built-in data set whole groups (modules, questions); of files a
    seeded share of `eval_fraction`, all rows with the same prompt on one side. `max_rows` caps the training rows (of
    files the first ones are taken, and no more than needed are read), `max_eval_rows` the held-out ones.

    Args:
        accepts: formats that the objective can use, all by default. A row is taken for the richest of them that it
            fits, so `("prompt",)` reads prompts from rows that hold completions too.

    Raises:
        UserError: a file, row or setting that cannot be used, or nothing left on one side.
    """
    if not 0 <= section.eval_fraction < 1:
        raise UserError(f"data.eval_fraction must be at least 0 and below 1, found {section.eval_fraction}.")
    report = DataReport()
    reader = _Reader(section, report, accepts)
    built_in = _built_in(section.source)
    # As many rows as leave max_rows for training once the share is held out.
    share = 0.0 if section.eval_source else section.eval_fraction
    limit = math.ceil(section.max_rows / (1 - share)) if section.max_rows else None
    loaded, report.sources = reader.read(section.source, "data.source", limit)
    train, held = loaded.rows, []
    if section.eval_source:
        evaluated, report.eval_sources = reader.read(section.eval_source, "data.eval_source", None)
        held = evaluated.rows
        report.split = f"held-out rows from {', '.join(report.eval_sources)}"
        _warn_of_overlap(train, held, report)
    elif section.eval_fraction == 0:
        report.split = "nothing held out (data.eval_fraction is 0)"
    elif built_in:
        train, held = _split_by_group(loaded, built_in, section.eval_fraction, section.seed)
        chosen = f"about {section.eval_fraction:.3g} of them, chosen by a hash of name and seed {section.seed}"
        report.split = f"whole {built_in.unit}, {chosen}"
    else:
        train, held = split_by_prompt(train, section.eval_fraction, section.seed)
        chosen = f"a random {section.eval_fraction:.3g} of the rows with seed {section.seed}"
        report.split = f"{chosen}, equal prompts on one side"
    if section.max_rows and len(train) > section.max_rows:
        # Built-in rows stand in the order of their groups: the first would be those of a few.
        train = _sample(train, section.max_rows, section.seed) if built_in else train[: section.max_rows]
    if section.max_eval_rows and len(held) > section.max_eval_rows:
        held = _sample(held, section.max_eval_rows, section.seed)
    report.rows_train, report.rows_eval = len(train), len(held)
    report.ignored_columns = sorted(reader.ignored)
    return Splits(train, held, report)


# Sources -> rows


def _built_in(source: Any) -> BuiltIn | None:
    name = source[0] if isinstance(source, list) and len(source) == 1 else source
    return BUILT_IN.get(name) if isinstance(name, str) else None


class _Reader:
    """Reads sources one after another and holds them to one format."""

    def __init__(self, section: DataSection, report: DataReport, accepts: Sequence[str] | None):
        self.format, self.columns, self.accepts = section.format, section.columns, accepts
        self.skip, self.report = section.on_bad_row == "skip", report
        self.ignored: set[str] = set()
        self.built_in_read: set[str] = set()
        self.first = ""  # the place of the row that settled the format
        self.shape: Shape | None = None  # what that row was taken for
        stated = {shape.also for shape in SHAPES if accepts is not None and shape.format in accepts}
        if accepts is not None and section.format not in ("auto", *accepts, *stated):
            raise UserError(
                f"data.format: the objective cannot use {section.format}, but {_either(accepts)}: set one of these, or "
                "another objective."
            )
        usable = [shape for shape in SHAPES if accepts is None or shape.format in accepts]
        self.shapes = [shape for shape in usable if shape.asked_for(section.format)]
        known = {name for shape in SHAPES for name in shape.columns}
        unknown = sorted(set(self.columns) - known)
        if unknown:
            raise UserError(f"data.columns: unknown name {clip(unknown)}. Known: {', '.join(sorted(known))}.")

    def wants(self, format_name: str) -> bool:
        return self.format in ("auto", format_name) and (self.accepts is None or format_name in self.accepts)

    def read(self, source: Any, setting: str, limit: int | None) -> tuple[Loaded, list[str]]:
        """The usable rows of a source and what it is called: all of a built-in data set, or the first `limit` of all
        files; the groups of these are empty."""
        built_in = _built_in(source)
        if built_in:
            return self._read_built_in(built_in, setting)
        return self._read_files(source, setting, limit)

    def _read_built_in(self, data: BuiltIn, setting: str) -> tuple[Loaded, list[str]]:
        if self.format != "auto" and self.format not in data.formats:
            raise UserError(f"data.format: {data.name} is {data.format}, not {self.format}.")
        if self.columns and setting == "data.source":
            raise UserError(f"data.columns: {data.name} has no columns to rename.")
        usable = [name for name in data.formats if self.wants(name)]
        asked = self.format != "auto" or data.format != "preference"
        wanted = next((name for name in usable if asked or name != "prompt-completion"), None)
        if wanted is None:
            raise UserError(
                f"{setting}: {data.name} is {data.format}, which the objective cannot use"
                f"{CHOSEN_HINT if usable else f': it takes {_either(self.accepts or ())}'}."
            )
        if data.name in self.built_in_read:
            raise UserError(f"{setting}: {data.name} is named in data.source too; its rows would be trained on.")
        self.built_in_read.add(data.name)
        try:
            loaded = data.load()
        except UserError as error:
            raise type(error)(f"{setting}: {data.name}: {error}") from error
        shape = next(shape for shape in SHAPES if shape.format == wanted and shape.fits(loaded.rows[0]))
        self._settle(shape, shape.convert(loaded.rows[0]), data.name)
        self.report.rows_read += len(loaded.rows) + len(loaded.skipped)
        self.report.skipped += loaded.skipped
        rows = loaded.rows if wanted == data.format else [shape.convert(row) for row in loaded.rows]
        return Loaded(rows, loaded.groups), [data.origin]

    def _read_files(self, source: Any, setting: str, limit: int | None) -> tuple[Loaded, list[str]]:
        _check_names(source, setting)
        files = find_files(source, setting)
        trained = {Path(name).resolve() for name in self.report.sources}
        twice = [file for file in files if file.resolve() in trained]
        if twice:
            raise UserError(f"{setting}: {twice[0]} is named in data.source too; its rows would be trained on.")
        rows: list[Row] = []
        names: list[str] = []
        skipped = len(self.report.skipped)
        for file in files:
            names.append(str(file))
            self._read_file(file, rows, limit)
            if self._enough(rows, limit):
                break
        if not rows:
            first = self.report.skipped[skipped]
            raise UserError(
                f"{setting}: no usable row in {', '.join(names)}: "
                f"{len(self.report.skipped) - skipped} skipped, the first at "
                f"{place(first.file, first.line)}: {first.reason}."
            )
        return Loaded(self._gathered(rows, names, setting)), names

    def _gathered(self, rows: list[Row], names: list[str], setting: str) -> list[Row]:
        """The rows in the format that was asked for, where that takes several rows."""
        if self.shape is None or self.shape.gather is None:
            return rows
        found, left_out = self.shape.gather(rows)
        for cause, count in left_out.items():
            self.report.left_out[cause] = self.report.left_out.get(cause, 0) + count
        if not found:
            causes = ", ".join(f"{count} {cause}" for cause, count in left_out.items())
            raise UserError(f"{setting}: no pair in {', '.join(names)}: {causes}.")
        return found

    def _read_file(self, file: Path, rows: list[Row], limit: int | None) -> None:
        for line, raw in read_rows(file):
            self.report.rows_read += line > 0
            try:
                if isinstance(raw, BadRow):
                    raise Unusable(raw.reason)
                rows.append(self._convert(raw, place(file, line)))
            except Unusable as fault:
                if not self.skip:
                    raise UserError(
                        f"{place(file, line)}: {fault}. (data.on_bad_row: skip leaves such rows out.)"
                    ) from None
                self.report.skipped.append(Skipped(str(file), line, str(fault)))
            if self._enough(rows, limit):
                return

    def _enough(self, rows: list[Row], limit: int | None) -> bool:
        # How many rows scored ones make is known once all are read.
        return bool(limit) and len(rows) >= (limit or 0) and not (self.shape and self.shape.gather)

    def _convert(self, raw: Row, where: str) -> Row:
        row, mapped = self._rename(raw)
        # A row may fit several forms (Alpaca files often hold a `text` too): the richest comes first, and
        # what the user mapped goes before all.
        fitting = [shape for shape in self.shapes if shape.fits(row)]
        if mapped:
            fitting = [shape for shape in fitting if mapped & shape.columns]
        if not fitting:
            raise Unusable(self._why_not(raw, row))
        shape = fitting[0]
        if shape.format == "prompt-completion" and self.format == "auto" and isinstance(row.get("label"), bool):
            raise Unusable(
                "label says whether the completion is wanted (unpaired preference), and the objective does not heed "
                "it: set data.format: prompt-completion to train on every completion"
            )
        converted = shape.convert(row)
        self._settle(shape, converted, where)
        if not shape.keeps_rest:
            self.ignored |= {str(name)[:40] for name in row.keys() - shape.columns}
        return converted

    def _settle(self, shape: Shape, converted: Row, where: str) -> None:
        """The first row says what all must be."""
        recognised = shape.describe(converted)
        if not self.report.recognised:
            self.report.format, self.report.recognised, self.first = shape.format, recognised, where
            self.shape = shape
        elif recognised != self.report.recognised:
            raise UserError(
                f"{where}: this row is {recognised}, but {self.first} is "
                f"{self.report.recognised}. All rows of a run must have one format: "
                "separate them, or set data.format and data.columns."
            )

    def _why_not(self, raw: Row, row: Row) -> str:
        advice = hint(row, [shape.format for shape in self.shapes])
        if advice:
            return advice
        others = [shape.name for shape in SHAPES if shape.fits(row)]
        if self.format != "auto":
            found = f"does not fit data.format {self.format}"
        elif others and others[0] not in [shape.name for shape in self.shapes]:
            found = f"is {others[0]}, which the objective cannot use"
        else:
            found = "fits no known format"
        expected = "; or ".join(" and ".join(shape.keys) for shape in self.shapes)
        return f"{found}: found the keys {clip(raw)}; expected {expected} (data.columns maps other names to these)"

    def _rename(self, raw: Row) -> tuple[Row, set[str]]:
        taken: set[str] = set()
        mapped: Row = {}
        for ours, theirs in self.columns.items():
            # `translation.en`: a field of an object, unless a column is called so.
            name, dot, inner = (theirs, "", "") if theirs in raw else theirs.partition(".")
            found = raw.get(name) if dot else raw
            if not isinstance(found, dict) or (inner if dot else name) not in found:
                raise Unusable(f"has no column {theirs!r} (data.columns.{ours}): found {clip(raw)}")
            taken.add(name)
            mapped[ours] = found[inner if dot else name]
        return {name: value for name, value in raw.items() if name not in taken} | mapped, set(mapped)


def _either(formats: Sequence[str]) -> str:
    *most, last = formats
    return f"{', '.join(most)} or {last}" if most else last


def _check_names(source: Any, setting: str) -> None:
    """Raises UserError for a name that was meant as a built-in data set; no file can be read without a suffix."""
    names = [source] if isinstance(source, str) else [name for name in source if isinstance(name, str)]
    for name in names:
        if Path(name).exists() or not re.fullmatch(r"[\w-]+", name):
            continue
        if name in BUILT_IN:
            raise UserError(f"{setting}: the built-in data set {name} cannot stand in a list with others.")
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        if near:
            raise UserError(f"{setting}: no file matches {name!r}. Did you mean the built-in data set {near[0]}?")


# Rows -> two sides


def _split_by_group(loaded: Loaded, data: BuiltIn, fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row, group in zip(loaded.rows, loaded.groups, strict=True):
        sides[in_held_out_part(group, eval_fraction=fraction, seed=seed)].append(row)
    if not (sides[0] and sides[1]):
        raise UserError(
            f"data.eval_fraction = {fraction} with data.seed = {seed} leaves {len(sides[0])} rows to "
            f"train on and {len(sides[1])} held out: {data.unit} stay whole. Choose a fraction nearer 0.1."
        )
    return sides


def split_by_prompt(rows: list[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Hold out about `fraction` of the rows, both sides in the rows' order, equal prompts on one side.

    Raises:
        UserError: all rows have the same prompt, so that one side would be empty.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(prompt_key(row), []).append(index)
    if len(groups) < 2:
        raise UserError(
            f"data.eval_fraction: cannot hold rows out: all {len(rows)} usable rows have one prompt. "
            "Add rows, name a file in data.eval_source, or set data.eval_fraction to 0."
        )
    # By a hash of the prompt, not by position: most rows keep their side when the file grows.
    order = sorted(groups, key=lambda key: hashlib.blake2b(f"{seed}:{key}".encode()).digest())
    target = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    held: set[int] = set()
    for key in order:
        if len(held) + len(groups[key]) <= target:
            held.update(groups[key])
    if not held:
        held.update(groups[min(order, key=lambda key: len(groups[key]))])
    sides: tuple[list[Row], list[Row]] = ([], [])
    for index, row in enumerate(rows):
        sides[index in held].append(row)
    return sides


def prompt_key(row: Row) -> str:
    """What two rows share when one would give the other's answer away."""
    if "prompt" not in row and "messages" in row:
        # The opening, so that a conversation and its continuations stay together.
        roles = [message["role"] for message in row["messages"]]
        turns = row["messages"][: roles.index("assistant")] or row["messages"]
        return _joined(turns)
    asked = next(row[name] for name in ("prompt", "text", "source", "tokens") if name in row)
    if isinstance(asked, str):
        return " ".join(asked.split())
    return _joined(asked) if isinstance(asked[0], dict) else " ".join(asked)


def _joined(messages: Iterable[Row]) -> str:
    return "\n".join(f"{message['role']}: {' '.join(message['content'].split())}" for message in messages)


def _warn_of_overlap(train: list[Row], held: list[Row], report: DataReport) -> None:
    trained = {prompt_key(row) for row in train}
    shared = sum(prompt_key(row) in trained for row in held)
    if shared:
        report.warnings.append(
            f"{shared} of {len(held)} held-out rows have a prompt that is also trained on: "
            "their loss says little about new prompts"
        )


def _sample(rows: list[Row], count: int, seed: int) -> list[Row]:
    return [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), count))]
