"""Rows of documents that lie in shards: each is put together when it is asked for."""

from typing import TYPE_CHECKING, Any

import torch

from ..errors import UserError
from ..tokens.best_fit import best_fit, parts
from ..tokens.report import IGNORE, TokenizationReport, TokenizedData

if TYPE_CHECKING:
    import numpy as np

    from .reader import TokenShards
    from .selection import TokenDocuments

Row = dict[str, "np.ndarray[Any, Any]"]


class Blocks(torch.utils.data.Dataset[Row]):
    """All documents one after another, cut every `size` tokens; the last block is shorter.

    Memory: 16 bytes for each stretch of documents between held-out ones.
    """

    def __init__(self, documents: "TokenDocuments", size: int) -> None:
        import numpy as np

        self.shards, self.size = documents.shards, size
        self.starts, counts = documents.stretches()
        self.before = np.concatenate([[0], np.cumsum(counts)])
        self.tokens = int(self.before[-1])
        # Nothing predicts the one token of a last block.
        self.count = -(-self.tokens // size) - (self.tokens % size == 1)

    def __len__(self) -> int:
        return self.count

    def length(self, index: int) -> int:
        """Tokens of a row, without reading it."""
        return min(self.size, self.tokens - index * self.size)

    def __getitem__(self, index: int) -> Row:
        import numpy as np

        here = _place(index, self) * self.size
        end = min(here + self.size, self.tokens)
        stretch = int(np.searchsorted(self.before, here, side="right")) - 1
        pieces = []
        while here < end:
            offset = here - int(self.before[stretch])
            count = min(int(self.before[stretch + 1]), end) - here
            pieces.append(self.shards.read(int(self.starts[stretch]) + offset, count))
            here, stretch = here + count, stretch + 1
        ids = np.concatenate(pieces)
        labels = ids.copy()
        labels[0] = IGNORE
        return {"input_ids": ids, "labels": labels}


class Packed(torch.utils.data.Dataset[Row]):
    """Rows of whole documents or parts of them.

    Memory: 16 bytes for each document or part.
    """

    def __init__(
        self, shards: "TokenShards", starts: Any, lengths: Any, bounds: Any | None = None, *, positions: bool
    ) -> None:
        """
        Args:
            starts, lengths: [parts], among the folder's tokens, row by row.
            bounds: [rows + 1], where each row begins among the parts; a row for each part where it is None.
            positions: rows have `position_ids`, which start again with each part.
        """
        import numpy as np

        self.shards, self.starts, self.lengths, self.positions = shards, starts, lengths, positions
        self.bounds = np.arange(len(starts) + 1) if bounds is None else bounds

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def length(self, index: int) -> int:
        """Tokens of a row, without reading it."""
        return int(self.lengths[self.bounds[index] : self.bounds[index + 1]].sum())

    def __getitem__(self, index: int) -> Row:
        import numpy as np

        index = _place(index, self)
        mine = slice(int(self.bounds[index]), int(self.bounds[index + 1]))
        starts, lengths = self.starts[mine].tolist(), self.lengths[mine].tolist()
        ids = np.concatenate([self.shards.read(start, count) for start, count in zip(starts, lengths, strict=True)])
        positions = np.concatenate([np.arange(count) for count in lengths])
        labels = np.where(positions == 0, IGNORE, ids)
        return {"input_ids": ids, "labels": labels} | ({"position_ids": positions} if self.positions else {})


def _place(index: int, rows: Any) -> int:
    if not -len(rows) <= index < len(rows):
        raise IndexError(index)
    return index % len(rows)


def prepare(documents: "TokenDocuments", *, max_length: int, packing: str, truncation: str) -> TokenizedData:
    """The rows of `plain_text.tokenize_documents`, of tokens that are there already.

    Raises:
        UserError: no row is left.
    """
    make = {"blocks": _blocks, "documents": _packed, "none": _single}[packing]
    report = TokenizationReport(rows=len(documents))
    rows: Any = make(documents, max_length, truncation, report)
    report.rows_kept = len(rows)
    report.stopped = report.rows_kept - report.truncated
    report.dropped = {cause: count for cause, count in report.dropped.items() if count}
    if not report.rows_kept:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.dropped.items())) or "no document"
        raise UserError(
            f"None of the {report.rows} documents leaves anything to train on: {causes}. objective.max_length is "
            f"{max_length} and the longest document has {report.longest} tokens"
        )
    return TokenizedData(rows, report)


def _blocks(documents: "TokenDocuments", size: int, truncation: str, report: TokenizationReport) -> Blocks:
    rows = Blocks(documents, size)
    alone = -(-rows.tokens // size) - len(rows)
    report.dropped = {"nothing to predict": alone}
    report.tokens, report.supervised_tokens = rows.tokens - alone, rows.tokens - alone - len(rows)
    report.longest = min(size, rows.tokens)
    return rows


def _packed(documents: "TokenDocuments", size: int, truncation: str, report: TokenizationReport) -> Packed:
    import numpy as np

    starts, lengths = documents.bounds()
    report.longest = int(lengths.max(initial=0))
    offsets, owners = parts(lengths, size)
    starts, lengths = starts[owners] + offsets, np.minimum(lengths[owners] - offsets, size)
    order, bounds = best_fit(lengths, size)
    starts, lengths = starts[order], lengths[order]
    if len(lengths):
        predicted = np.add.reduceat(lengths - 1, bounds[:-1])
        kept = np.repeat(predicted > 0, np.diff(bounds))  # a row may hold nothing but end tokens
        report.dropped = {"nothing to predict": int((predicted == 0).sum())}
        counts = np.diff(bounds)[predicted > 0]
        starts, lengths, bounds = starts[kept], lengths[kept], np.concatenate([[0], np.cumsum(counts)])
    report.tokens, report.supervised_tokens = int(lengths.sum()), int((lengths - 1).sum())
    return Packed(documents.shards, starts, lengths, bounds, positions=True)


def _single(documents: "TokenDocuments", size: int, truncation: str, report: TokenizationReport) -> Packed:
    import numpy as np

    if truncation not in ("drop", "keep_start"):
        raise UserError(
            f"data.truncation: {truncation} is not possible for token shards: set drop or keep_start, or "
            "objective.packing: documents, which cuts longer ones into parts"
        )
    starts, lengths = documents.bounds()
    report.longest = int(lengths.max(initial=0))
    long = lengths > size
    dropped = long if truncation == "drop" else np.zeros_like(long)
    alone = ~dropped & (lengths < 2)
    report.dropped = {"longer than max_length": int(dropped.sum()), "nothing to predict": int(alone.sum())}
    kept = ~dropped & ~alone
    report.truncated = int((long & kept).sum())
    starts, lengths = starts[kept], np.minimum(lengths[kept], size)
    report.tokens, report.supervised_tokens = int(lengths.sum()), int((lengths - 1).sum())
    return Packed(documents.shards, starts, lengths, positions=False)
