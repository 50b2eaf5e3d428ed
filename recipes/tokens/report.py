"""What tokenisation gives: a data set of tokens and labels, and what became of the rows."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

IGNORE = -100  # the label of a token that is not trained on


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

    @property
    def supervised_share(self) -> float:
        """Supervised tokens divided by tokens, 0 to 1."""
        return self.supervised_tokens / self.tokens if self.tokens else 0.0


class TokenizedData(NamedTuple):
    """`dataset`: a `datasets.Dataset` with the columns `input_ids` and `labels`, lists of equal length."""

    dataset: Any
    report: TokenizationReport


def decode_preview(
    tokenized: TokenizedData, tokenizer: Any, n: int = 3, marks: tuple[str, str] = ("⟦", "⟧")
) -> list[str]:
    """The first `n` rows as text, special tokens included, the supervised parts between `marks`."""
    previews = []
    for row in tokenized.dataset.select(range(min(n, len(tokenized.dataset)))):
        ids, on = row["input_ids"], [label != IGNORE for label in row["labels"]]
        bounds = [0, *(i for i in range(1, len(ids)) if on[i] != on[i - 1]), len(ids)]
        # Growing prefixes, not pieces: some decoders drop the space that a piece begins with.
        texts = [tokenizer.decode(ids[:bound], clean_up_tokenization_spaces=False) for bound in bounds]
        parts = []
        for index in range(len(bounds) - 1):
            part = texts[index + 1][len(texts[index]) :]
            parts.append(f"{marks[0]}{part}{marks[1]}" if on[bounds[index]] else part)
        previews.append("".join(parts))
    return previews
