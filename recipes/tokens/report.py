"""What tokenisation gives: a data set of tokens and labels, and what became of the rows."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

IGNORE = -100  # the label of a token that is not trained on

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class TokenizationReport:
    """What became of the rows.

    Attributes:
        rows, rows_kept: rows given and rows that came out.
        dropped: cause -> number of rows left out.
        truncated: kept rows that were cut at the longest length.
        beginnings_cut: those of them that have lost their beginning, not their end.
        pieces: kept rows that are pieces of longer ones, which were split.
        continued: those of them behind which more is learned of their row.
        empty_pieces: pieces left out because nothing in them is supervised.
        tokens: tokens in the kept rows.
        supervised_tokens: labels that a causal model is trained on: those other than -100 from the second
            position on, since nothing predicts the first token of a row.
        longest: tokens of the longest row before any cut.
        merged: kept rows in which one token holds a prompt's end and an answer's start; it counts as prompt.
        stopped: kept rows with their end whose supervised part ends in a stop id.
        warnings: what the user ought to know before training.
        counted: what a warning will count -> the number so far.
        made: how the tokens came about, in words.
    """

    rows: int = 0
    rows_kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    beginnings_cut: int = 0
    pieces: int = 0
    continued: int = 0
    empty_pieces: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0
    merged: int = 0
    stopped: int = 0
    warnings: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    made: str = field(default="", compare=False)

    def add(self, other: "TokenizationReport") -> None:
        """Take the report on the rows that follow into this one."""
        counts = ("rows", "rows_kept", "truncated", "beginnings_cut", "pieces", "continued", "empty_pieces", "tokens")
        for name in (*counts, "supervised_tokens", "merged", "stopped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)
        for mine, theirs in ((self.dropped, other.dropped), (self.counted, other.counted)):
            for cause, count in theirs.items():
                mine[cause] = mine.get(cause, 0) + count
        self.warnings = list(dict.fromkeys([*self.warnings, *other.warnings]))

    @property
    def supervised_share(self) -> float:
        """Supervised tokens divided by tokens, 0 to 1."""
        return self.supervised_tokens / self.tokens if self.tokens else 0.0


class TokenizedData(NamedTuple):
    """`dataset`: a `datasets.Dataset` with the columns `input_ids` and `labels`, lists of equal length."""

    dataset: Any
    report: TokenizationReport


def mixed(parts: "Sequence[TokenizedData]", sizes: Sequence[int], rows_per_epoch: Sequence[int]) -> TokenizedData:
    """One data set of those of several sources, one after another.

    Args:
        sizes: rows of each; rows_per_epoch: how many of them an epoch holds, for the report: its tokens are those of
            one epoch, on average.
    """
    from datasets import concatenate_datasets

    report = TokenizationReport()
    for part in parts:
        report.add(part.report)
    shares = [count / size for count, size in zip(rows_per_epoch, sizes, strict=True)]
    scaled = ("rows_kept", "tokens", "supervised_tokens", "truncated", "stopped", "merged")
    for name in (*scaled, "beginnings_cut", "pieces", "continued", "empty_pieces"):
        values = [getattr(part.report, name) for part in parts]
        setattr(report, name, round(sum(value * share for value, share in zip(values, shares, strict=True))))
    return TokenizedData(concatenate_datasets([part.dataset for part in parts]), report)


def row_wise(finish: Callable[..., None], **absent: Any) -> Callable[[F], F]:
    """Mark a function `(rows, tokenizer, **settings) -> TokenizedData` whose outcome for a row depends on that row
    alone, so that rows can be given to it in parts, by several processes.

    The function itself makes a part; what is returned in its place makes the whole. A part may be empty. A
    `UserError` on a single row must begin with "Row", its number in the part, and a space or colon.

    Args:
        finish: called as `finish(report, **settings)` with the report on all rows; it may complete it, and raises
            where nothing is left.
        absent: columns that a part has only where one of its rows needs it -> the value of the other rows.
    """

    def marked(part: F) -> F:
        @functools.wraps(part)
        def whole(rows: Iterable[dict[str, Any]], tokenizer: Any, **settings: Any) -> TokenizedData:
            data = part(rows, tokenizer, **settings)
            finish(data.report, **settings)
            return data

        whole.part, whole.finish, whole.absent = part, finish, absent  # type: ignore[attr-defined]
        return whole  # type: ignore[return-value]

    return marked


class Tokenizing(NamedTuple):
    """How rows become tokens: `function(rows, tokenizer, **settings)`, which depends on nothing else.

    Attributes:
        function: of a module, such as `supervised.tokenize_rows`.
        settings: its keyword arguments, of values that JSON has.
    """

    function: Any
    settings: dict[str, Any]

    def run(self, rows: Iterable[dict[str, Any]], tokenizer: Any) -> TokenizedData:
        """Raises:
        UserError: rows that cannot be used, or none left.
        """
        return self.function(rows, tokenizer, **self.settings)
