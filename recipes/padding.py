"""Rows of one batch, padded on the right to the longest of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .tokenize_sft import IGNORE

if TYPE_CHECKING:
    import torch


def pad_rows(rows: Sequence[dict[str, Any]], pad_token_id: int) -> "dict[str, torch.Tensor]":
    """A batch of rows with `input_ids` and any other columns.

    Columns of numbers become [rows]. Columns of lists become [rows, longest]: `input_ids` are padded with the padding
    token, `labels` with -100, all others with 0. `attention_mask` is 1 on what was there.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    fill = {"input_ids": pad_token_id, "labels": IGNORE}
    batch = {}
    for name, first in rows[0].items():
        values = [torch.as_tensor(row[name]) for row in rows]
        lists = not isinstance(first, int)
        batch[name] = pad_sequence(values, True, fill.get(name, 0)) if lists else torch.stack(values)
    batch["attention_mask"] = pad_sequence([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], True)
    return batch
