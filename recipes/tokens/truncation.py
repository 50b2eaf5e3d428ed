"""What becomes of rows that are longer than the limit: the policies of `data.truncation`."""

from collections.abc import Sequence
from typing import Any, Literal

from .report import IGNORE, TokenizationReport

Truncation = Literal["drop", "keep_start", "keep_end", "split"]
TOO_LONG = "longer than max_length"

Piece = tuple[list[int], list[int]]


def pieces(
    ids: list[int], labels: list[int], limit: int | None, truncation: Truncation, bos: int | None
) -> list[Piece]:
    """What is kept of a row, as (ids, labels) of at most `limit` tokens each; nothing of one that is left out.

    "keep_end" keeps the beginning-of-sequence token `bos` where the row begins with it. Of "split", each piece begins
    with the last token of the one before, which is read and not trained on there: so every token but the row's first
    is predicted in one piece, from what stands before it in that piece.
    """
    if not limit or len(ids) <= limit:
        return [(ids, labels)]
    if truncation == "keep_start":
        return [(ids[:limit], labels[:limit])]
    if truncation == "keep_end":
        kept = first_kept(ids, bos)
        start = len(ids) - limit + kept
        # Nothing predicts the first token.
        first = labels[:1] if kept else [IGNORE]
        return [(ids[:kept] + ids[start:], first + labels[start + 1 - kept :])]
    if truncation == "split":
        starts = range(0, len(ids) - 1, max(limit - 1, 1))
        return [(ids[i : i + limit], [IGNORE if i else labels[0], *labels[i + 1 : i + limit]]) for i in starts]
    return []


def first_kept(ids: list[int], bos: int | None) -> int:
    """How many tokens at the beginning stay when it is cut off."""
    return int(bos is not None and ids[:1] == [bos])


def count_cut(report: TokenizationReport, truncation: Truncation, kept: int = 1) -> None:
    """Count a longer row of which `kept` rows came."""
    if truncation == "split":
        report.pieces += kept
        report.continued += kept - 1
    else:
        report.truncated += kept
        report.beginnings_cut += kept * (truncation == "keep_end")


def cut(tokenizer: Any, texts: Sequence[Any], limit: int, truncation: Truncation, **options: Any) -> Any:
    """What the tokenizer makes of texts within the limit. It cuts them itself, so that what it writes at the ends stays
    there: at the beginning for "keep_end", else at the end."""
    before = tokenizer.truncation_side
    tokenizer.truncation_side = "left" if truncation == "keep_end" else "right"
    try:
        return tokenizer(texts, truncation=True, max_length=limit, **options)
    finally:
        tokenizer.truncation_side = before
