"""The arithmetic of proximal policy optimisation, on tensors alone.

Tensors are [rows, tokens]. A mask is True at the tokens that count, which come first in each row; what stands elsewhere
has no influence, whatever it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def kl_penalty(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates of KL(policy || reference) at each sampled token, k1 or k3 of http://joschu.net/blog/kl-approx.html."""
    difference = ref_logps - logps
    return -difference if estimator == "k1" else torch.expm1(difference) - difference


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns by generalised advantage estimation (arXiv:1506.02438, eq. 16).

    A row ends with its mask: nothing comes after it, whether it ended by itself or was cut off.
    """
    rewards, values = rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage).masked_fill(~mask[:, t], 0)
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    shift_mean: bool = True,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> torch.Tensor:
    """Values with variance 1 over the mask, and mean 0 unless `shift_mean` is False; 0 outside.

    Args:
        total: adds a scalar up over all processes.
    """
    count = total(mask.sum())
    mean = total(values.masked_fill(~mask, 0).sum()) / count
    centred = (values - mean).masked_fill(~mask, 0)
    scaled = centred * torch.rsqrt(total(centred.square().sum()) / count + 1e-8)
    return scaled if shift_mean else (scaled + mean).masked_fill(~mask, 0)


def clipped_policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    cliprange: float,
    tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The negative clipped objective (arXiv:1707.06347, eq. 7), and the share of tokens where the clip holds.

    Args:
        tokens: divides the sums over the mask; default the tokens of the mask. With those of a whole mini-batch the
            results of its parts add up to its own.
    """
    tokens = mask.sum() if tokens is None else tokens
    ratio = (logps - old_logps).masked_fill(~mask, 0).exp()
    advantages = advantages.masked_fill(~mask, 0)
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(free, clipped).sum() / tokens, (clipped > free).sum() / tokens


def clipped_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    cliprange: float,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Half the squared error, of the value or of the value held within `cliprange` of the old one, whichever is more.

    Args:
        tokens: as in `clipped_policy_loss`.
    """
    held = old_values + (values - old_values).clamp(-cliprange, cliprange)
    error = torch.maximum((values - returns).square(), (held - returns).square()).masked_fill(~mask, 0)
    return 0.5 * error.sum() / (mask.sum() if tokens is None else tokens)


class AdaptiveKL:
    """The weight of the divergence, steered in proportion to its relative error (arXiv:1909.08593, sec. 2.2).

    Args:
        target: divergence per completion; None: beta stays as it is.
        horizon: K_beta of the paper is completions / horizon.
    """

    def __init__(self, beta: float, target: float | None, horizon: float) -> None:
        self.beta, self.target, self.horizon = beta, target, horizon

    def update(self, kl: float, completions: int) -> None:
        """Take account of a rollout with this mean divergence per completion."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.beta *= 1 + error * completions / self.horizon


def completion_mask(completions: torch.Tensor, stop_ids: list[int]) -> torch.Tensor:
    """True up to the first stop token and at it, [rows, tokens]."""
    stops = torch.isin(completions, torch.tensor(stop_ids, dtype=completions.dtype, device=completions.device))
    return stops.long().cumsum(-1) - stops.long() == 0


def padded(rows: list[list[int]], pad: int, side: str, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both [rows, longest], with the padding on that side."""
    ids = nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=pad, padding_side=side
    )
    mask = nn.utils.rnn.pad_sequence(
        [torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True, padding_side=side
    )
    return ids.to(device), mask.to(device)
