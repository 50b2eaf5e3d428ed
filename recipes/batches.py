"""Rows of token ids as padded tensors, for training and for measuring alike."""

from collections.abc import Iterator, Sequence
from typing import Any

IGNORE = -100


class Batcher:
    """Pads rows on the right; a collator for the library's Trainer.

    The library's own collators pad labels on the tokenizer's side: on the left, padding would come between the start
    token of a decoder and its first word. And they make a mask only where the tokenizer says so.

    Args:
        pad_token_id: what stands behind `input_ids`.
        decoder_inputs: makes `decoder_input_ids` of labels, where the labels do not reach the model.
    """

    def __init__(self, pad_token_id: int, decoder_inputs: Any = None) -> None:
        self.pad_token_id, self.decoder_inputs = pad_token_id, decoder_inputs

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Rows of `input_ids`, and `labels` (one class or value, several values, or one for each token), to tensors."""
        import torch

        ids = [row["input_ids"] for row in rows]
        batch = {
            "input_ids": padded(ids, self.pad_token_id),
            "attention_mask": padded([[1] * len(row) for row in ids], 0),
        }
        if "labels" not in rows[0]:
            return batch
        labels = [row["labels"] for row in rows]
        if isinstance(labels[0], list) and all(isinstance(value, int) for value in labels[0]):
            batch["labels"] = padded(labels, IGNORE)
        else:
            batch["labels"] = torch.tensor(labels)
        if self.decoder_inputs is not None:
            batch["decoder_input_ids"] = self.decoder_inputs(batch["labels"])
        return batch

    def by_length(
        self, rows: Sequence[dict[str, Any]], size: int, device: Any
    ) -> "Iterator[tuple[list[int], dict[str, Any]]]":
        """Batches of rows of like length, each with the places of its rows."""
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]["input_ids"]))
        for start in range(0, len(order), size):
            places = order[start : start + size]
            yield places, {name: value.to(device) for name, value in self([rows[i] for i in places]).items()}


def padded(rows: Sequence[Sequence[int]], value: int) -> Any:
    """Rows of numbers to a tensor [rows, longest], `value` behind the shorter ones."""
    import torch

    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
