"""Training and held-out rows for supervised fine-tuning, from files or from the built-in data set.

Every row comes out in one of three forms:

    {"prompt": ..., "completion": ...}   both text, or both lists of messages
    {"messages": [{"role": ..., "content": ...}, ...]}
    {"text": ...}

A row that cannot be used is an error with file, line and reason, or is counted and listed; a reason never
quotes the row's content.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .data_files import BadRow, Skipped, clip, find_files, place, read_rows, type_name
from .docstrings import describe_python, is_held_out, load_docstrings
from .errors import UserError

BUILT_IN = "stdlib-docstrings"
ROLES = ("system", "user", "assistant")

Row = dict[str, Any]


class DataSection(Protocol):
    """What is read of a recipe's `data` section."""

    @property
    def source(self) -> Any: ...  # "stdlib-docstrings", or a path, a glob, or a list of them
    @property
    def format(self) -> str: ...  # auto | prompt-completion | messages | text
    @property
    def columns(self) -> dict[str, str]: ...  # our name -> the file's column
    @property
    def on_bad_row(self) -> str: ...  # error | skip
    @property
    def max_rows(self) -> int | None: ...  # at most this many training rows
    @property
    def eval_source(self) -> Any: ...
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
        format: prompt-completion, messages or text: the form of the rows that come out.
        recognised: what the rows were taken for, e.g. "Alpaca (instruction, input, output)".
        sources, eval_sources: the files read, in order.
        rows_read: rows found in all files, those skipped included.
        skipped: (file, line, reason) of each row left out under `on_bad_row: skip`.
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


def load_splits(section: DataSection) -> Splits:
    """Read the rows that a recipe's `data` section names and hold a part out.

    The held-out part is the file in `eval_source`; for the built-in data whole modules; else a seeded share
    of `eval_fraction`, all rows with the same prompt on one side. `max_rows` caps the training rows (of
    files the first ones are taken, and no more than needed are read), `max_eval_rows` the held-out ones.

    Raises:
        UserError: a file, row or setting that cannot be used, or nothing left on one side.
    """
    if not 0 <= section.eval_fraction < 1:
        raise UserError(f"data.eval_fraction must be at least 0 and below 1, found {section.eval_fraction}.")
    report = DataReport()
    reader = _Reader(section, report)
    if section.source == BUILT_IN:
        train, held = _built_in(section, report)
    else:
        # As many rows as leave max_rows for training once the share is held out.
        share = 0.0 if section.eval_source else section.eval_fraction
        limit = math.ceil(section.max_rows / (1 - share)) if section.max_rows else None
        train, report.sources = reader.read(section.source, "data.source", limit)
        held = []
    if section.eval_source:
        held, report.eval_sources = reader.read(section.eval_source, "data.eval_source", None)
        report.split = f"held-out rows from {', '.join(report.eval_sources)}"
        _warn_of_overlap(train, held, report)
    elif section.eval_fraction == 0:
        train, held = train + held, []
        report.split = "nothing held out (data.eval_fraction is 0)"
    elif section.source != BUILT_IN:
        train, held = split_by_prompt(train, section.eval_fraction, section.seed)
        chosen = f"a random {section.eval_fraction:.3g} of the rows with seed {section.seed}"
        report.split = f"{chosen}, equal prompts on one side"
    if section.max_rows and len(train) > section.max_rows:
        built_in = section.source == BUILT_IN
        train = _sample(train, section.max_rows, section.seed) if built_in else train[: section.max_rows]
    if section.max_eval_rows and len(held) > section.max_eval_rows:
        held = _sample(held, section.max_eval_rows, section.seed)
    report.rows_train, report.rows_eval = len(train), len(held)
    report.ignored_columns = sorted(reader.ignored)
    return Splits(train, held, report)


def _built_in(section: DataSection, report: DataReport) -> tuple[list[Row], list[Row]]:
    if section.format not in ("auto", "prompt-completion"):
        raise UserError(f"data.format: {BUILT_IN} is prompt-completion, not {section.format}.")
    if section.columns:
        raise UserError(f"data.columns: {BUILT_IN} has no columns to rename.")
    data = load_docstrings()
    report.format, report.recognised = "prompt-completion", "prompt and completion as messages"
    report.sources = [describe_python()]
    report.rows_read = len(data.rows) + len(data.unreadable)
    report.skipped = [Skipped(file, 0, reason) for file, reason in data.unreadable]
    if section.eval_source:
        return data.rows, []
    fraction, seed = section.eval_fraction, section.seed
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row in data.rows:
        sides[is_held_out(row["module"], eval_fraction=fraction, seed=seed)].append(row)
    if fraction and not (sides[0] and sides[1]):
        raise UserError(
            f"data.eval_fraction = {fraction} with data.seed = {seed} leaves {len(sides[0])} rows to "
            f"train on and {len(sides[1])} held out: modules stay whole. Choose a fraction nearer 0.1."
        )
    report.split = f"whole modules, about {fraction:.3g} of them, chosen by a hash of name and seed {seed}"
    return sides


# Files -> rows


class _Shape(NamedTuple):
    """A form of row met in practice: the keys that mark it and how it is converted."""

    name: str
    format: str
    keys: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Row], Row]


class _Unusable(Exception):
    """Why a row cannot be used."""


class _Reader:
    """Reads files one after another and holds them to one format."""

    def __init__(self, section: DataSection, report: DataReport):
        self.columns, self.skip, self.report = section.columns, section.on_bad_row == "skip", report
        self.ignored: set[str] = set()
        self.first = ""  # the place of the row that settled the format
        self.shapes = [shape for shape in _SHAPES if section.format in ("auto", shape.format)]
        known = {name for shape in _SHAPES for name in (*shape.keys, *shape.optional)}
        unknown = sorted(set(self.columns) - known)
        if unknown:
            raise UserError(f"data.columns: unknown name {clip(unknown)}. Known: {', '.join(sorted(known))}.")

    def read(self, source: Any, setting: str, limit: int | None) -> tuple[list[Row], list[str]]:
        """The usable rows of all files of `source`, up to `limit`, and the files' names."""
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
            if limit and len(rows) >= limit:
                break
        if not rows:
            first = self.report.skipped[skipped]
            raise UserError(
                f"{setting}: no usable row in {', '.join(names)}: "
                f"{len(self.report.skipped) - skipped} skipped, the first at "
                f"{place(first.file, first.line)}: {first.reason}."
            )
        return rows, names

    def _read_file(self, file: Path, rows: list[Row], limit: int | None) -> None:
        for line, raw in read_rows(file):
            self.report.rows_read += line > 0
            try:
                if isinstance(raw, BadRow):
                    raise _Unusable(raw.reason)
                rows.append(self._convert(raw, file, line))
            except _Unusable as fault:
                if not self.skip:
                    raise UserError(
                        f"{place(file, line)}: {fault}. (data.on_bad_row: skip leaves such rows out.)"
                    ) from None
                self.report.skipped.append(Skipped(str(file), line, str(fault)))
            if limit and len(rows) >= limit:
                return

    def _convert(self, raw: Row, file: Path, line: int) -> Row:
        row, mapped = self._rename(raw)
        # A row may fit several forms (Alpaca files often hold a `text` too): the richest comes first, and
        # what the user mapped goes before all.
        fitting = [shape for shape in self.shapes if set(shape.keys) <= row.keys()]
        if mapped:
            fitting = [shape for shape in fitting if mapped & {*shape.keys, *shape.optional}]
        if not fitting:
            expected = "; or ".join(" and ".join(shape.keys) for shape in self.shapes)
            raise _Unusable(
                f"fits no known format: found the keys {clip(raw)}; expected {expected} "
                "(data.columns maps other names to these)"
            )
        shape = fitting[0]
        converted = shape.convert(row)
        kind = " as messages" if isinstance(converted.get("prompt"), list) and shape.name != _ALPACA else ""
        recognised = shape.name + kind
        if not self.report.recognised:
            self.report.format, self.report.recognised = shape.format, recognised
            self.first = place(file, line)
        elif recognised != self.report.recognised:
            raise UserError(
                f"{place(file, line)}: this row is {recognised}, but {self.first} is "
                f"{self.report.recognised}. All rows of a run must have one format: "
                "separate them, or set data.format and data.columns."
            )
        self.ignored |= {str(name)[:40] for name in row.keys() - {*shape.keys, *shape.optional}}
        return converted

    def _rename(self, raw: Row) -> tuple[Row, set[str]]:
        for ours, theirs in self.columns.items():
            if theirs not in raw:
                raise _Unusable(f"has no column {theirs!r} (data.columns.{ours}): found {clip(raw)}")
        taken = set(self.columns.values())
        rest = {name: value for name, value in raw.items() if name not in taken}
        mapped = {ours: raw[theirs] for ours, theirs in self.columns.items()}
        return rest | mapped, set(mapped)


# One row -> one of the three forms


def _text(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _Unusable(f"{name} must be text, found {type_name(value)}")
    if not may_be_empty and not value.strip():
        raise _Unusable(f"{name} is empty")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise _Unusable(f"{name} holds half of a surrogate pair, which is no character")
    return value


def _messages(value: Any, name: str, *, role_key: str = "role", content_key: str = "content") -> list[Row]:
    if not isinstance(value, list):
        raise _Unusable(f"{name} must be a list of messages, found {type_name(value)}")
    if not value:
        raise _Unusable(f"{name} is empty")
    messages = []
    for index, message in enumerate(value):
        here = f"{name}[{index}]"
        if not isinstance(message, dict):
            raise _Unusable(f"{here} must be an object with {role_key} and {content_key}")
        for key in ("tool_calls", "function_call", "weight"):
            # Leaving these out would train on something else than the file says.
            if message.get(key) is not None:
                raise _Unusable(f"{here} has {key}, which is not supported")
        role = message.get(role_key)
        role = _SHAREGPT_ROLES.get(role, role) if role_key == "from" and isinstance(role, str) else role
        if role not in ROLES:
            raise _Unusable(f"{here}.{role_key} must be system, user or assistant")
        content = _text(message.get(content_key), f"{here}.{content_key}", may_be_empty=True)
        messages.append({"role": role, "content": content})
    return messages


def _ends_with_assistant(messages: list[Row], name: str) -> list[Row]:
    if messages[-1]["role"] != "assistant":
        raise _Unusable(f"{name} must end with an assistant message, ends with {messages[-1]['role']}")
    _text(messages[-1]["content"], f"the last assistant message of {name}")
    return messages


def _from_messages(row: Row) -> Row:
    return {"messages": _ends_with_assistant(_messages(row["messages"], "messages"), "messages")}


def _from_sharegpt(row: Row) -> Row:
    value = row["conversations"]
    openai = isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]
    keys = {} if openai else {"role_key": "from", "content_key": "value"}
    messages = _messages(value, "conversations", **keys)
    return {"messages": _system(row) + _ends_with_assistant(messages, "conversations")}


def _from_prompt_completion(row: Row) -> Row:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) != isinstance(completion, list) and None not in (prompt, completion):
        raise _Unusable("prompt and completion must be both text or both lists of messages")
    if not isinstance(prompt, list):
        return {"prompt": _text(prompt, "prompt"), "completion": _text(completion, "completion")}
    messages = _messages(prompt, "prompt")
    if not any(message["content"].strip() for message in messages):
        raise _Unusable("prompt is empty")
    answer = _messages(completion, "completion")
    return {"prompt": messages, "completion": _ends_with_assistant(answer, "completion")}


def _from_alpaca(row: Row) -> Row:
    request = _text(row["instruction"], "instruction")
    extra = _optional(row, "input")
    prompt = f"{request}\n\n{extra}" if extra.strip() else request
    answer = {"role": "assistant", "content": _text(row["output"], "output")}
    return {"prompt": [*_system(row), {"role": "user", "content": prompt}], "completion": [answer]}


def _optional(row: Row, name: str) -> str:
    return "" if row.get(name) is None else _text(row[name], name, may_be_empty=True)


def _system(row: Row) -> list[Row]:
    text = _optional(row, "system")
    return [{"role": "system", "content": text}] if text.strip() else []


_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
_ALPACA = "Alpaca (instruction, input, output), converted to messages"
_SHAREGPT = "ShareGPT (conversations), converted to messages"
_SHAPES = (
    _Shape("messages", "messages", ("messages",), (), _from_messages),
    _Shape(_SHAREGPT, "messages", ("conversations",), ("system",), _from_sharegpt),
    _Shape("prompt and completion", "prompt-completion", ("prompt", "completion"), (), _from_prompt_completion),
    _Shape(_ALPACA, "prompt-completion", ("instruction", "output"), ("input", "system"), _from_alpaca),
    _Shape("text", "text", ("text",), (), lambda row: {"text": _text(row["text"], "text")}),
)


# Rows -> two sides


def split_by_prompt(rows: list[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Hold out about `fraction` of the rows, both sides in the rows' order, equal prompts on one side.

    Raises:
        UserError: all rows have the same prompt, so that one side would be empty.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(_prompt_key(row), []).append(index)
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


def _prompt_key(row: Row) -> str:
    """What two rows share when one would give the other's answer away."""
    if "messages" in row:
        # The opening, so that a conversation and its continuations stay together.
        roles = [message["role"] for message in row["messages"]]
        turns = row["messages"][: roles.index("assistant")] or row["messages"]
        return _joined(turns)
    prompt = row.get("prompt", row.get("text"))
    return _joined(prompt) if isinstance(prompt, list) else " ".join(str(prompt).split())


def _joined(messages: Iterable[Row]) -> str:
    return "\n".join(f"{message['role']}: {' '.join(message['content'].split())}" for message in messages)


def _warn_of_overlap(train: list[Row], held: list[Row], report: DataReport) -> None:
    trained = {_prompt_key(row) for row in train}
    shared = sum(_prompt_key(row) in trained for row in held)
    if shared:
        report.warnings.append(
            f"{shared} of {len(held)} held-out rows have a prompt that is also trained on: "
            "their loss says little about new prompts"
        )


def _sample(rows: list[Row], count: int, seed: int) -> list[Row]:
    return [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), count))]
