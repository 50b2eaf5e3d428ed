"""What was read and what became of it."""

from dataclasses import dataclass, field

from .faults import Skipped

# Of more skipped rows than these only the number is kept.
_LISTED = 10_000


@dataclass
class SourceReport:
    """What one source gave.

    Attributes:
        name: as the recipe writes it.
        forms: what its rows were taken for.
        rows_read, skipped: rows found, and those of them that could not be used.
        rows_train, rows_eval: rows that are trained on and that are held out.
        rows_per_epoch: where sources have weights.
        not_read: why it was not read to its end, or "".
    """

    name: str
    forms: list[str] = field(default_factory=list)
    rows_read: int = 0
    skipped: int = 0
    rows_train: int = 0
    rows_eval: int = 0
    rows_per_epoch: int | None = None
    not_read: str = ""

    def describe(self) -> str:
        """One line for the plan."""
        counts = [f"{self.rows_read:,} rows read", f"{self.rows_train:,} to train on", f"{self.rows_eval:,} held out"]
        counts += [f"{self.skipped:,} skipped"] if self.skipped else []
        counts += [] if self.rows_per_epoch is None else [f"{self.rows_per_epoch:,} an epoch"]
        counts += [self.not_read] if self.not_read else []
        return f"{self.name}: {' and '.join(self.forms) or 'no rows'}; {', '.join(counts)}"


@dataclass
class DataReport:
    """What was read and what became of it.

    Attributes:
        format: the format of the rows that come out, one of `formats.FORMATS`; of rows of several, the first one's.
        recognised: what the rows were taken for, e.g. "Alpaca (instruction, input, output)".
        sources, eval_sources: the files read, in order, or the origin of a built-in data set.
        by_source, by_eval_source: what each source of the recipe gave.
        rows_read: rows found in all sources, those skipped included.
        skipped: (file, line, reason) of each row left out under `on_bad_row: skip`, of the first ten thousand.
        rows_skipped: their number.
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
    by_source: list[SourceReport] = field(default_factory=list)
    by_eval_source: list[SourceReport] = field(default_factory=list)
    rows_read: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    rows_skipped: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    rows_train: int = 0
    rows_eval: int = 0
    split: str = ""
    ignored_columns: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def skip(self, skipped: Skipped) -> None:
        self.rows_skipped += 1
        if len(self.skipped) < _LISTED:
            self.skipped.append(skipped)
