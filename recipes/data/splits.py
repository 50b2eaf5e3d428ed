"""Training and held-out rows, from files, data sets of the Hub, functions and built-in data sets.

Every row comes out in the canonical form of its format, see `formats`. A row that cannot be used is an error with
file, line and reason, or is counted and listed; a reason never quotes the row's content.
"""

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from ..errors import UserError
from .builtin import BUILT_IN
from .formats import Row
from .holding import Part, hold_out, prompt_key
from .mixture import Mixture
from .python_rows import file_digest
from .reader import Reader
from .report import DataReport, SourceReport
from .sources import Source
from .stream import HELD_OUT, RowStream, Streamed


class DataSection(Protocol):
    """What is read of a recipe's `data` section."""

    @property
    def source(self) -> Any: ...  # text or a mapping, or a list of them, see `sources`
    @property
    def format(self) -> str: ...  # auto, or one of formats.FORMATS
    @property
    def columns(self) -> dict[str, str]: ...  # our name -> the file's column
    @property
    def on_bad_row(self) -> str: ...  # error | skip
    @property
    def max_rows(self) -> int | None: ...  # at most this many training rows
    @property
    def epoch_rows(self) -> int | None: ...  # of sources with weights
    @property
    def streaming(self) -> bool: ...  # read anew each time, never all in memory
    @property
    def eval_source(self) -> Any: ...  # as source
    @property
    def eval_fraction(self) -> float: ...  # 0 holds nothing out
    @property
    def max_eval_rows(self) -> int | None: ...
    @property
    def seed(self) -> int: ...


@dataclass
class Splits:
    """Rows to train on and rows held out, plain dicts, and the report on both.

    Attributes:
        train: a list; where the recipe says `data.streaming`, a stream that can be gone through any number of times.
        eval: a list.
        mixture: which training rows make an epoch, where sources have weights.
        code: digests of the user's files that made rows.
    """

    train: list[Row] | RowStream
    eval: list[Row]
    report: DataReport
    mixture: Mixture | None = None
    code: tuple[str, ...] = ()

    @property
    def train_by_source(self) -> "Sequence[list[Row] | RowStream]":
        """The training rows of each source by themselves."""
        if isinstance(self.train, RowStream):
            return self.train.parts()
        rows = iter(self.train)
        return [list(islice(rows, part.rows_train)) for part in self.report.by_source]

    @property
    def digest(self) -> str:
        """Of all rows, in their order, and of the code that made them."""
        digest = hashlib.blake2b(digest_size=16)
        if isinstance(self.train, RowStream):
            digest.update(self.train.digest)
        train = () if isinstance(self.train, RowStream) else _identities(self.train)
        for row in (*train, None, *_identities(self.eval)):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
        for code in self.code:
            digest.update(code.encode())
        return digest.hexdigest()


def _identities(rows: Any) -> Any:
    """What tells rows from others: their digest where they have one, as documents in shards do, else they."""
    return [rows.digest] if hasattr(rows, "digest") else rows


def load_splits(section: DataSection, accepts: Sequence[str] | None = None) -> Splits:
    """Read the rows that a recipe's `data` section names and hold a part out.

    The held-out part is what `eval_source` names; of a built-in data set whole groups (modules, questions); of all
    else a seeded share of `eval_fraction` of each source, all rows with the same prompt on one side. `max_rows` caps
    the training rows (the first ones are taken, and no more than needed are read; of built-in data sets and of sources
    with weights a sample), `max_eval_rows` the held-out ones.

    Args:
        accepts: formats that the objective can use, all by default. A row is taken for the richest of them that it
            fits, so `("prompt",)` reads prompts from rows that hold completions too.

    Raises:
        UserError: a file, row or setting that cannot be used, or nothing left on one side.
    """
    from ..shards.splits import load_token_splits, names_shards

    if names_shards(section):
        return load_token_splits(section, accepts)
    if not 0 <= section.eval_fraction < 1:
        raise UserError(f"data.eval_fraction must be at least 0 and below 1, found {section.eval_fraction}.")
    report = DataReport()
    reader = Reader(accepts, report)
    sources = reader.open(section.source, "data.source", section)
    examined = reader.open(section.eval_source, "data.eval_source", section) if section.eval_source else []
    code = tuple(file_digest(source) for source in (*sources, *examined) if source.kind == "python")
    load = _load_stream if section.streaming else _load
    train, held = load(section, reader, sources, examined)
    report.rows_train, report.rows_eval = len(train), len(held)
    report.ignored_columns = sorted(reader.ignored)
    return Splits(train, held, report, _mixture(section, sources, report), code)


def _load(
    section: DataSection, reader: Reader, sources: Sequence[Source], examined: Sequence[Source]
) -> tuple[list[Row], list[Row]]:
    report = reader.report
    # As many rows as leave max_rows for training once the share is held out.
    share = 0.0 if section.eval_source else section.eval_fraction
    sampled = any(source.kind == "built-in" or source.weight is not None for source in sources)
    limit = None if sampled or not section.max_rows else math.ceil(section.max_rows / (1 - share))
    parts = _read(reader, sources, "data.source", share, limit, report.sources)
    report.by_source = [part.report for part in parts]
    if section.eval_source:
        read = _read(reader, examined, "data.eval_source", 0.0, None, report.eval_sources)
        report.by_eval_source = [part.report for part in read]
        report.split = f"held-out rows from {', '.join(report.eval_sources)}"
        for part in parts:
            part.train = list(part.rows)
        for part in read:
            part.held = list(part.rows)
    elif section.eval_fraction == 0:
        report.split = "nothing held out (data.eval_fraction is 0)"
        for part in parts:
            part.train = list(part.rows)
    else:
        report.split = hold_out(parts, section.eval_fraction, section.seed)
    for part in parts:
        if (most := part.source.max_rows) and len(part.train) > most:
            # Built-in rows stand in the order of their groups: the first would be those of a few.
            part.train = _sample(part.train, most, section.seed) if part.groups else part.train[:most]
    evaluated = read if section.eval_source else parts
    if section.eval_source:
        for part in read:
            part.held = part.held[: part.source.max_rows] if part.source.max_rows else part.held
        _warn_of_overlap([row for part in parts for row in part.train], [r for p in read for r in p.held], report)
    if section.max_rows:
        _cap([part.train for part in parts], section.max_rows, section.seed if sampled else None)
    if section.max_eval_rows:
        _cap([part.held for part in evaluated], section.max_eval_rows, section.seed)
    for part in (*parts, *(read if section.eval_source else ())):
        part.report.rows_train, part.report.rows_eval = len(part.train), len(part.held)
    return [row for part in parts for row in part.train], [row for part in evaluated for row in part.held]


def _read(
    reader: Reader, sources: Sequence[Source], setting: str, share: float, limit: int | None, names: list[str]
) -> list[Part]:
    """The usable rows of each source: all of a built-in data set, of others no more than limits leave a use for."""
    parts, total = [], 0
    for source in sources:
        part = Part(source, SourceReport(source.name), [])
        parts.append(part)
        if limit is not None and total >= limit:
            part.report.not_read = "not read, as data.max_rows was reached"
        elif source.kind == "built-in":
            loaded = reader.built_in(source, part.report)
            part.rows, part.groups = loaded.rows, loaded.groups
            names.append(BUILT_IN[source.where].origin)
        else:
            own = None if source.max_rows is None else math.ceil(source.max_rows / (1 - share))
            bounds = [bound for bound in (own, None if limit is None else limit - total) if bound is not None]
            part.rows = list(islice(reader.rows(source, part.report, names), min(bounds, default=None)))
        total += len(part.rows)
    if sources and not total:
        raise reader.nothing_found(setting, names)
    return parts


def _load_stream(
    section: DataSection, reader: Reader, sources: Sequence[Source], examined: Sequence[Source]
) -> tuple[RowStream, list[Row]]:
    report, given = reader.report, section.eval_source is not None
    read = _read(reader, examined, "data.eval_source", 0.0, None, report.eval_sources)
    for part in read:
        part.held = list(part.rows)
    _cap([part.held for part in read], section.max_eval_rows or HELD_OUT, section.seed)
    held = [row for part in read for row in part.held]
    stream = Streamed(section, reader, sources, 0.0 if given else section.eval_fraction)
    train, chosen, shared = stream.first_pass(report, {prompt_key(row) for row in held})
    if shared:
        report.warnings.append(_overlap(f"{shared} prompts of the held-out rows are"))
    report.by_eval_source = [part.report for part in read]
    for part in read:
        part.report.rows_eval = len(part.held)
    if given:
        report.split = f"held-out rows from {', '.join(report.eval_sources)}"
    elif section.eval_fraction == 0:
        report.split = "nothing held out (data.eval_fraction is 0)"
    else:
        found = sum(part.rows_eval for part in report.by_source)
        part_of = "" if found == len(chosen) else f", a sample of {found:,} such rows"
        report.split = (
            f"about {section.eval_fraction:.3g} of the prompts, chosen by their hash and seed {section.seed}{part_of}"
        )
    return train, held or chosen


def _mixture(section: DataSection, sources: Sequence[Source], report: DataReport) -> Mixture | None:
    """Which rows make an epoch, where a source has a weight; a source without one beside it has 1."""
    if all(source.weight is None for source in sources):
        return None
    for source, part in zip(sources, report.by_source, strict=True):
        if not part.rows_train:
            raise UserError(f"{source.setting}: {source.name} leaves no row to train on, so it can have no weight.")
    weights = [1.0 if source.weight is None else source.weight for source in sources]
    mixture = Mixture([part.rows_train for part in report.by_source], weights, section.epoch_rows, section.seed)
    for source, part, count in zip(sources, report.by_source, mixture.rows_per_epoch, strict=True):
        part.rows_per_epoch = count
        if not count:
            raise UserError(
                f"{source.setting_of('weight')}: {source.name} would give no row to an epoch of {len(mixture):,}: "
                "raise its weight or data.epoch_rows."
            )
    return mixture


def _warn_of_overlap(train: list[Row], held: list[Row], report: DataReport) -> None:
    trained = {prompt_key(row) for row in train}
    shared = sum(prompt_key(row) in trained for row in held)
    if shared:
        report.warnings.append(_overlap(f"{shared} of {len(held)} held-out rows have a prompt that is"))


def _overlap(counted: str) -> str:
    return f"{counted} also trained on: their loss says little about new prompts"


def _cap(lists: Sequence[list[Row]], count: int, seed: int | None) -> None:
    """Shorten lists in place to `count` rows in all: the first ones, or a seeded sample that keeps their order."""
    total = sum(map(len, lists))
    if total <= count:
        return
    kept = set(range(count) if seed is None else random.Random(seed).sample(range(total), count))
    start = 0
    for rows in lists:
        end = start + len(rows)
        rows[:] = [row for place, row in enumerate(rows, start) if place in kept]
        start = end


def _sample(rows: list[Row], count: int, seed: int) -> list[Row]:
    return [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), count))]
