"""Training losses: sums divided by what the whole batch holds, so that accumulation does not change them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from .linear import better_in_fp32

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
        _warn_of_no_target(len(targets), num_items_in_batch)
    return _divide(total, supervised.sum(), num_items_in_batch)


def _warn_of_no_target(rows: int, num_items_in_batch: Count) -> None:
    if num_items_in_batch is not None and num_items_in_batch > 0:  # the other rows of the step have some
        return
    logger.warning(
        f"None of the {rows} rows of this batch has a label to learn from: the loss is 0. "
        "Are prompts longer than the maximum length, or is the label mask empty?"
    )


def z_loss(
    logits: torch.Tensor, targets: torch.Tensor, num_items_in_batch: Count = None, ignore_index: int = IGNORED
) -> torch.Tensor:
    """log(Z)^2 with Z the sum of exp(logits), which keeps Z near 1 (PaLM, arXiv:2204.02311, sec. 5), where there is a
    target; arguments and divisor as of `token_loss`."""
    supervised = targets.to(logits.device) != ignore_index
    squares = torch.logsumexp(logits.float(), dim=-1) ** 2
    return _divide(squares.masked_fill(~supervised, 0).sum(), supervised.sum(), num_items_in_batch)


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
    return token_loss(*next_tokens(logits, labels, shift_labels), num_items_in_batch, ignore_index)


def next_tokens(
    values: torch.Tensor, labels: torch.Tensor | None, shift_labels: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [batch, length, ...] and the labels that they have to predict: values[:, :-1] and labels[:, 1:].

    Args:
        labels: [batch, length].
        shift_labels: labels already shifted, one for each of all values.
    """
    if shift_labels is not None:
        return values, shift_labels
    if labels is None:
        raise ValueError("causal_lm_loss needs labels or shift_labels")
    return values[:, :-1], labels[:, 1:]


def supervised_loss(
    hidden_states: torch.Tensor,
    targets: torch.Tensor,
    total_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    num_items_in_batch: Count = None,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """As `token_loss`, but of hidden states [..., hidden_size]: those without a target never become logits.

    Args:
        total_of: the summed cross-entropy of states [tokens, hidden_size] and targets [tokens], or several sums
            [n]; there may be no token.

    Raises:
        ValueError: not one target for each hidden state.
    """
    states, targets = hidden_states.flatten(0, -2), targets.to(hidden_states.device)
    if len(states) != targets.numel():
        raise ValueError(f"{len(states)} hidden states need as many labels, not {targets.numel()}")
    # By index and not by mask: the gradient of a mask adds up values that might repeat, and sorts them first.
    chosen = (targets.flatten() != ignore_index).nonzero().squeeze(-1)
    if not len(chosen):
        _warn_of_no_target(len(targets), num_items_in_batch)
    total = total_of(states.index_select(0, chosen), targets.flatten()[chosen])
    return _divide(total, torch.tensor(len(chosen)), num_items_in_batch)


def recomputed_cross_entropy(
    states: torch.Tensor,
    targets: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    chunk_size: int,
    z_coef: float = 0.0,
) -> torch.Tensor:
    """As `linear_cross_entropy`, but through any head: backward computes the logits of a chunk again.

    Args:
        logits_of: [tokens, hidden_size] -> [tokens, classes].
    """

    def total_of(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits_of(states).float()
        total = nn.functional.cross_entropy(logits, targets.to(logits.device), reduction="sum")
        if not z_coef:
            return total
        z = (torch.logsumexp(logits, dim=-1) ** 2).sum()
        return torch.stack([total + z_coef * z, z.detach()])

    # Without any token there is one empty chunk, which keeps the loss of 0 connected to the head.
    chunks = zip(states.split(chunk_size), targets.split(chunk_size), strict=True)
    return torch.stack([checkpoint(total_of, *chunk, use_reentrant=False) for chunk in chunks]).sum(0)


def linear_cross_entropy(
    states: torch.Tensor,
    targets: torch.Tensor,
    head: nn.Linear,
    finish: Callable[[torch.Tensor], torch.Tensor],
    chunk_size: int,
    z_coef: float = 0.0,
) -> torch.Tensor:
    """Summed cross-entropy behind a linear layer, `chunk_size` tokens at a time; nothing is computed twice.

    The gradients are taken at once, while a chunk's logits are there, and backward only scales them. torch's function
    of this name adds the loss up in the type of the states, for which bf16 is too coarse, and knows no `finish`.

    Args:
        states: [tokens, hidden_size]. targets: [tokens].
        head: a plain layer, as `linear.is_plain` says.
        finish: what is done with each logit behind the head, without parameters.
        z_coef: factor of the z-loss.

    Returns:
        The sum; with a factor two values: the sum with `z_coef` times the z-loss, and the summed z-loss alone.
    """
    tensors = [states, head.weight, head.bias]
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
        tensors = [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]
    elif better_in_fp32(states, head.weight):
        tensors = [tensor if tensor is None else tensor.float() for tensor in tensors]
    totals = _LinearCrossEntropy.apply(*tensors, targets, finish, chunk_size, z_coef)
    return totals if z_coef else totals[0]


def is_sharded(head: nn.Module) -> bool:
    """Whether each call of a head gathers its weights from other processes (FSDP's own unit, DeepSpeed's ZeRO-3).

    All processes must call such a head equally often, but they have different numbers of chunks.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if any(isinstance(module, FullyShardedDataParallel) for module in head.modules()):
        return True
    return any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in head.parameters())


class _LinearCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy` of tensors of one type."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        finish: Callable[[torch.Tensor], torch.Tensor],
        chunk_size: int,
        z_coef: float,
    ) -> torch.Tensor:
        by_states, by_weight, by_bias = ctx.needs_input_grad[:3]
        grad_states = torch.empty_like(states) if by_states else None
        # In at least fp32: in 16 bits the sum over many chunks would lose what each of them adds.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if by_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if by_bias and bias is not None else None
        totals = torch.zeros(2, device=states.device)
        for start in range(0, len(states), chunk_size):
            part = slice(start, start + chunk_size)
            logits = nn.functional.linear(states[part], weight, bias)
            losses, slope = _losses_and_slope(logits, targets[part], finish, z_coef)
            totals += losses
            if grad_states is not None:
                grad_states[part] = slope @ weight
            if grad_weight is not None:
                if grad_weight.dtype == slope.dtype:
                    grad_weight.addmm_(slope.T, states[part])
                else:
                    grad_weight += slope.T @ states[part]
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=grad_bias.dtype)
            del logits, slope  # before the next chunk's logits are there
        ctx.save_for_backward(grad_states, grad_weight, grad_bias)
        ctx.dtype = states.dtype
        return totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scales: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = [None if grad is None else (grad * scales[0]).to(ctx.dtype) for grad in ctx.saved_tensors]
        return (*grads, None, None, None, None)


def _losses_and_slope(
    logits: torch.Tensor, targets: torch.Tensor, finish: Callable[[torch.Tensor], torch.Tensor], z_coef: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy in fp32 of `finish(logits)` with `z_coef` times the z-loss, and the z-loss alone, as [2];
    and the gradient of the first by logits [tokens, classes]."""
    with torch.enable_grad():
        finished = finish(logits.requires_grad_())
    values = finished.detach().float()
    log_z = torch.logsumexp(values, dim=-1, keepdim=True) if z_coef else None
    # What `finish` keeps for its own gradient must not change. torch's kernel for CPUs, row by row, may write where it
    # reads, which halves the memory of a chunk and, without new pages, the time.
    is_ours = finished is logits or finished.dtype != values.dtype
    slope = torch.log_softmax(values, -1, out=values if is_ours and values.device.type == "cpu" else None)
    loss = nn.functional.nll_loss(slope, targets, reduction="sum")
    z = torch.zeros_like(loss)
    slope.exp_()
    if log_z is not None:
        z = (log_z**2).sum()
        slope *= 1 + 2 * z_coef * log_z  # of log(Z)^2 by a logit: 2 log(Z) times its probability
    slope[torch.arange(len(targets), device=targets.device), targets] -= 1
    if finished is not logits:
        slope = torch.autograd.grad(finished, logits, slope.to(finished.dtype))[0]
    return torch.stack([loss + z_coef * z, z]), slope.to(logits.dtype)


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
