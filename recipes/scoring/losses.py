"""Losses of labelled tokens, token by token, whatever rows stand beside them in a batch."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..evaluation import evaluating
from ..tokens.padding import pad_rows
from ..tokens.report import IGNORE
from .meter import Meter

if TYPE_CHECKING:
    import torch

# Padded tokens of a batch, beyond which it gets no further row: logits of a whole vocabulary stand for each.
_MOST = 4096


def token_losses(
    model: Any,
    rows: Sequence[dict[str, Any]],
    lengths: Sequence[int],
    *,
    pad_token_id: int,
    batch_size: int,
    shift: int,
    meter: Meter,
) -> "list[torch.Tensor]":
    """Cross-entropy of each label under the model, in evaluation mode.

    Args:
        rows: with `input_ids`, `labels` (-100 where nothing is scored) and any other columns of the model's.
        lengths: of each row in tokens, by which they are put together.
        shift: 1: logits predict the next token, as a decoder's; 0: the token at their own place.

    Returns:
        Of each row a tensor [labels] of float64 in nats, 0 where nothing is scored.
    """
    import torch

    found: list[Any] = [None] * len(rows)
    with evaluating(model), torch.no_grad():
        for places in by_length(lengths, batch_size):
            chosen = [rows[place] for place in places]
            batch = {name: tensor.to(model.device) for name, tensor in pad_rows(chosen, pad_token_id).items()}
            labels = batch.pop("labels")
            if "decoder_input_ids" not in batch and shift == 0 and model.config.is_encoder_decoder:
                batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
            logits = model(**batch, use_cache=False).logits[:, -labels.shape[1] :]  # behind a soft prompt
            for row, place in enumerate(places):
                scored = labels[row] != IGNORE  # [labels]
                at = scored.nonzero()[:, 0] - shift
                loss = torch.nn.functional.cross_entropy(logits[row, at].float(), labels[row][scored], reduction="none")
                losses = torch.zeros(len(rows[place]["labels"]), dtype=torch.float64)
                losses[scored[: len(losses)].cpu()] = loss.double().cpu()
                found[place] = losses
            meter.add(len(places), sum(lengths[place] for place in places))
    return found


def by_length(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """The places of rows of like length, batch by batch."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) == size or (len(batch) + 1) * lengths[place] > _MOST):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
