"""Functions that other processes run, in a module that imports little."""

import os
import signal
import sys
from typing import Any

from anyformer.recipes.errors import UserError
from anyformer.recipes.tokens.report import TokenizationReport, TokenizedData, row_wise

CALLS: list[int] = []  # rows of each call in this process


def finish(report: TokenizationReport, **settings: Any) -> None:
    """All rows may be gone."""


@row_wise(finish)
def lengths(rows, tokenizer, *, deadly: str = ""):
    """The length of each text; the process kills itself at the text `deadly`, and warns of torch."""
    from datasets import Dataset

    rows = list(rows)
    CALLS.append(len(rows))
    if deadly and any(row["text"] == deadly for row in rows):
        os.kill(os.getpid(), signal.SIGKILL)
    for number, row in enumerate(rows, 1):
        if row["text"] == "bad":
            raise UserError(f"Row {number}: bad text")
        if row["text"] == "odd":
            raise TypeError("a fault of ours")
    report = TokenizationReport(rows=len(rows), rows_kept=len(rows), counted={str(os.getpid()): len(rows)})
    if "torch" in sys.modules:
        report.warnings.append("torch is imported")
    return TokenizedData(Dataset.from_dict({"input_ids": [[len(row["text"])] for row in rows]}), report)
