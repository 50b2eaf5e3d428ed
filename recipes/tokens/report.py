"""What tokenisation gives: a data set of tokens and labels, and what became of the rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

IGNORE = -100  # the label of a token that is not trained on


@dataclass
class TokenizationReport:
    """What became of the rows.

    Attributes:
        rows, rows_kept: rows given and rows that came out.
        dropped: cause -> number of rows left out.
        truncated: kept rows that were cut at `max_length`; they have lost their end.
        tokens: tokens in the kept rows.
        supervised_tokens: labels that a causal model is trained on: those other than -100 from the second
            position on, since nothing predicts the first token of a row.
        longest: tokens of the longest row before any cut.
        merged: kept rows in which one token holds a prompt's end and an answer's start; it counts as prompt.
        stopped: kept, uncut rows whose supervised part ends in a stop id.
        warnings: what the user ought to know before training.
    """

    rows: int = 0
    rows_kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0
    merged: int = 0
    stopped: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def supervised_share(self) -> float:
        """Supervised tokens divided by tokens, 0 to 1."""
        return self.supervised_tokens / self.tokens if self.tokens else 0.0


class TokenizedData(NamedTuple):
    """`dataset`: a `datasets.Dataset` with the columns `input_ids` and `labels`, lists of equal length."""

    dataset: Any
    report: TokenizationReport


class Tokenizing(NamedTuple):
    """How rows become tokens: `function(rows, tokenizer, **settings)`, which depends on nothing else.

    Attributes:
        function: of a module, such as `supervised.tokenize_rows`.
        settings: its keyword arguments, of values that JSON has.
    """

    function: Callable[..., TokenizedData]
    settings: dict[str, Any]

    def run(self, rows: Iterable[dict[str, Any]], tokenizer: Any) -> TokenizedData:
        """Raises:
        UserError: rows that cannot be used, or none left.
        """
        return self.function(rows, tokenizer, **self.settings)
