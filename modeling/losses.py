"""Training losses: sums divided by what the whole batch holds, so that accumulation does not change them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

logger = logging.get_logger(__name__)

IGNORED = -100
Count = torch.Tensor | int | None


def token_loss(
    logits: torch.Tensor, targets: torch.Tensor, num_items_in_batch: Count = None, ignore_index: int = IGNORED
) -> torch.Tensor:
    """Cross-entropy in fp32 of logits [..., classes] against targets [...].

    Args:
        targets: `ignore_index` where nothing is to be learned.
        num_items_in_batch: number of targets of the whole (accumulated, global) batch to divide the sum by; default:
            the targets of this call.

    Returns:
        A scalar. Where no target is left it is 0 and connected to the graph, not NaN, and a warning says so.
    """
    targets = targets.to(logits.device)
    total = nn.functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=ignore_index, reduction="sum"
    )
    supervised = targets != ignore_index
    if not is_tracing(targets) and not supervised.any():
        logger.warning(
            f"None of the {targets.shape[0]} rows of this batch has a label to learn from: the loss is 0. "
            "Are prompts longer than the maximum length, or is the label mask empty?"
        )
    return _divide(total, supervised.sum(), num_items_in_batch)


def _divide(total: torch.Tensor, here: torch.Tensor, num_items_in_batch: Count) -> torch.Tensor:
    divisor = here.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return total / (divisor.to(total.device) if isinstance(divisor, torch.Tensor) else divisor)


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
    num_items_in_batch: Count = None,
    ignore_index: int = IGNORED,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """`token_loss` of logits[:, :-1] against labels[:, 1:].

    Args:
        logits: [batch, length, vocab_size].
        labels: [batch, length], `ignore_index` where nothing is to be learned; shifted here.
        shift_labels: labels already shifted, as context parallelism hands them over.
    """
    if shift_labels is not None:
        return token_loss(logits, shift_labels, num_items_in_batch, ignore_index)
    if labels is None:
        raise ValueError("causal_lm_loss needs labels or shift_labels")
    return token_loss(logits[:, :-1], labels[:, 1:], num_items_in_batch, ignore_index)


def sequence_classification_loss(
    logits: torch.Tensor, labels: torch.Tensor, problem_type: str, num_items_in_batch: Count = None
) -> torch.Tensor:
    """Loss of logits [batch, labels]: squared error, cross-entropy, or a binary cross-entropy a label.

    Args:
        labels: [batch] classes or values; [batch, labels] for several values or several labels at once.
        problem_type: "regression", "single_label_classification" or "multi_label_classification".
        num_items_in_batch: number of labels of the whole batch as the trainer counts them: several a row where a row
            has several.
    """
    labels = labels.to(logits.device)
    if problem_type == "single_label_classification":
        return token_loss(logits, labels.view(-1), num_items_in_batch)
    values, targets = logits.float(), labels.float().view_as(logits)
    if problem_type == "regression":
        each = nn.functional.mse_loss(values, targets, reduction="none")
    else:
        each = nn.functional.binary_cross_entropy_with_logits(values, targets, reduction="none")
    return _divide(each.sum(), torch.tensor(each.numel()), num_items_in_batch)


def problem_type_of(num_labels: int, labels: torch.Tensor) -> str:
    """The kind of problem that labels of this type and count stand for, as the library decides it."""
    if num_labels == 1:
        return "regression"
    whole = not labels.is_floating_point()
    one_each = labels.dim() == 1 or labels.shape[-1] == 1
    return "single_label_classification" if whole and one_each else "multi_label_classification"


def load_balancing_loss(logits: torch.Tensor, router: Any, token_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Number of experts times sum over experts of (share of choices) * (mean score): 1 for an even router, at any k.

    DeepSeekMoE (arXiv:2401.06066, eq. 12-14); at k = 1 the loss of the Switch Transformer (arXiv:2101.03961, eq. 4).

    Args:
        logits: [tokens, experts] of one layer.
        router: the layer's router.
        token_mask: [tokens], true for real tokens: padding never changes the loss.
    """
    _, indices, scores = router.choose(logits)
    shares = scores / scores.sum(-1, keepdim=True)
    chosen = nn.functional.one_hot(indices, shares.shape[-1]).sum(1) / indices.shape[-1]  # [tokens, experts]
    weight = torch.ones(len(logits), device=logits.device) if token_mask is None else token_mask.float()
    weight = (weight / weight.sum().clamp(min=1))[:, None]
    return shares.shape[-1] * ((chosen * weight).sum(0) * (shares * weight).sum(0)).sum()


def router_z_loss(logits: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over real tokens of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, eq. 5)."""
    squares = torch.logsumexp(logits.float(), dim=-1) ** 2
    weight = torch.ones_like(squares) if token_mask is None else token_mask.float()
    return (squares * weight).sum() / weight.sum().clamp(min=1)


def router_losses(
    router_logits: Sequence[torch.Tensor],
    routers: Sequence[Any],
    config: Any,
    token_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the routers add to the loss (each part a mean over layers times its coefficient), and the mean
    load-balancing loss alone, without a coefficient.

    Args:
        router_logits: [tokens, experts] of each sparse layer; routers: those layers' routers.
        token_mask: [batch, length] or None.

    Raises:
        ValueError: the logits are cut off from the graph, so that the losses would train nothing.
    """
    mask = None if token_mask is None else token_mask.reshape(-1)
    trained = torch.is_grad_enabled() and any(router.weight.requires_grad for router in routers)
    if trained and not all(logits.requires_grad for logits in router_logits):
        raise ValueError(
            "the router losses get no gradient under reentrant gradient checkpointing: use "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    pairs = list(zip(router_logits, routers, strict=True))
    balance = torch.stack([load_balancing_loss(logits, router, mask) for logits, router in pairs]).mean()
    total = config.router_aux_loss_coef * balance
    if config.router_z_loss_coef:
        z = torch.stack([router_z_loss(logits, mask) for logits, _ in pairs])
        total = total + config.router_z_loss_coef * z.mean()
    return total, balance
