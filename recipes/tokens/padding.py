"""Rows of one batch, padded on the right to the longest of them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .report import IGNORE

if TYPE_CHECKING:
    import torch


def pad_rows(
    rows: Sequence[dict[str, Any]], pad_token_id: int, multiple: int | None = None
) -> "dict[str, torch.Tensor]":
    """A batch of rows with `input_ids` and any other columns.

    Args:
        multiple: the length of the longest row is made up to one of this.

    Columns of numbers become [rows]. Columns of lists become [rows, longest]: `input_ids` are padded with the padding
    token, `labels` with -100, all others with 0. `attention_mask` is 1 on what was there.

    The library's own collators make a mask only where the tokenizer says so, and pad labels on the tokenizer's side: on
    the left, padding would come between the start token of a decoder and its first word.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    fill = {"input_ids": pad_token_id, "labels": IGNORE}
    batch = {}
    for name, first in rows[0].items():
        values = [torch.as_tensor(row[name]) for row in rows]
        lists = not isinstance(first, int | float)
        batch[name] = pad_sequence(values, True, fill.get(name, 0)) if lists else torch.stack(values)
    batch["attention_mask"] = pad_sequence([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], True)
    if multiple and (short := -batch["input_ids"].shape[1] % multiple):
        columns = {name: values for name, values in batch.items() if values.dim() > 1}
        batch |= {name: torch.nn.functional.pad(v, (0, short), value=fill.get(name, 0)) for name, v in columns.items()}
    return batch


def by_length(
    rows: Sequence[dict[str, Any]], pad_token_id: int, size: int, device: Any
) -> "Iterator[tuple[list[int], dict[str, torch.Tensor]]]":
    """Padded batches of rows of like length, each with the places of its rows."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]["input_ids"]))
    for start in range(0, len(order), size):
        places = order[start : start + size]
        batch = pad_rows([rows[index] for index in places], pad_token_id)
        yield places, {name: tensor.to(device) for name, tensor in batch.items()}
