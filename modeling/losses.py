"""Training losses."""

import torch
from torch import nn
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

logger = logging.get_logger(__name__)


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """Cross-entropy of logits[:, :-1] against labels[:, 1:], in fp32.

    Args:
        logits: [batch, length, vocab_size].
        labels: [batch, length], `ignore_index` where nothing is to be learned; shifted here.
        num_items_in_batch: number of targets of the whole (accumulated, global) batch to divide the sum by; default:
            the targets of this call.
        shift_labels: labels already shifted, as context parallelism hands them over.

    Returns:
        A scalar. Where no label is left it is 0 and connected to the graph, not NaN, and a warning says so.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("causal_lm_loss needs labels or shift_labels")
        logits, targets = logits[:, :-1], labels[:, 1:]
    else:
        targets = shift_labels
    targets = targets.to(logits.device)
    total = nn.functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        ignore_index=ignore_index,
        reduction="sum",
    )
    supervised = targets != ignore_index
    if not is_tracing(targets) and not supervised.any():
        logger.warning(
            f"None of the {targets.shape[0]} rows of this batch has a label to learn from: the loss is 0. "
            "Are prompts longer than the maximum length, or is the label mask empty?"
        )
    divisor = supervised.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return total / (divisor.to(total.device) if isinstance(divisor, torch.Tensor) else divisor)
