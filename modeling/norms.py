"""Normalisation layers, over the last dimension: [..., size] -> [..., size]."""

import math

import torch
from torch import nn
from transformers import initialization as init

from .configuration_anyformer import AnyformerConfig
from .registry import NORMS


class AnyformerNorm(nn.Module):
    """What the norms have in common.

    Args:
        size: of the last dimension, or (heads, head_dim) for a weight of its own for each head.
        eps: added to the variance.

    Attributes:
        initial_weight: the weight at which the norm only normalises.
    """

    initial_weight = 1.0
    has_weight = True
    has_bias = False

    def __init__(self, size: int | tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.full(_shape(size), self.initial_weight)) if self.has_weight else None
        self.bias = nn.Parameter(torch.zeros(_shape(size))) if self.has_bias else None

    def reset(self) -> None:
        """The initial weights, left alone where they were loaded."""
        if self.weight is not None:
            init.constant_(self.weight, self.initial_weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def of_row(self, row: torch.Tensor) -> torch.Tensor:
        """`forward` of a single row [..., size] on a CPU, for inference: in fewer operators where that can be."""
        return self(row)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


def _shape(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else size


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rms_of_row(row: torch.Tensor, eps: float) -> torch.Tensor:
    """`_rms` of one row, whose factor is one number."""
    flat = row.view(-1)
    mean = torch.dot(flat, flat).item() / flat.shape[0] + eps
    return row * (1 / math.sqrt(mean) if mean else math.inf)  # as `rsqrt`


@NORMS.register("rmsnorm")
class AnyformerRMSNorm(AnyformerNorm):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4), computed in fp32."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * _rms(hidden_states.float(), self.eps).to(hidden_states.dtype)

    def of_row(self, row: torch.Tensor) -> torch.Tensor:
        return self.weight * _rms_of_row(row.float(), self.eps).to(row.dtype)


@NORMS.register("rmsnorm_offset")
class OffsetRMSNorm(AnyformerNorm):
    """RMSNorm times 1 + weight, rounded last (Gemma, arXiv:2403.08295)."""

    initial_weight = 0.0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (_rms(hidden_states.float(), self.eps) * (1.0 + self.weight.float())).to(hidden_states.dtype)

    def of_row(self, row: torch.Tensor) -> torch.Tensor:
        return (_rms_of_row(row.float(), self.eps) * (1.0 + self.weight.float())).to(row.dtype)


@NORMS.register("rmsnorm_plain")
class PlainRMSNorm(AnyformerNorm):
    """RMSNorm without a weight."""

    has_weight = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _rms(hidden_states.float(), self.eps).to(hidden_states.dtype)


@NORMS.register("layernorm")
class AnyformerLayerNorm(AnyformerNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016, arXiv:1607.06450)."""

    has_bias = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight + (1.0 - self.initial_weight)
        size = hidden_states.shape[-1:]
        if weight is None or weight.dim() == 1:
            return nn.functional.layer_norm(hidden_states, size, weight, self.bias, self.eps)
        normed = nn.functional.layer_norm(hidden_states, size, None, None, self.eps) * weight
        return normed if self.bias is None else normed + self.bias


@NORMS.register("layernorm_nobias")
class UnbiasedLayerNorm(AnyformerLayerNorm):
    """LayerNorm without a bias (MPT, Cohere)."""

    has_bias = False


@NORMS.register("layernorm_offset")
class OffsetLayerNorm(AnyformerLayerNorm):
    """LayerNorm times 1 + weight (Nemotron, arXiv:2402.16819)."""

    initial_weight = 0.0


@NORMS.register("layernorm_plain")
class PlainLayerNorm(AnyformerLayerNorm):
    """LayerNorm without weight and bias (OLMo, arXiv:2402.00838)."""

    has_weight = False
    has_bias = False


NORMS_OF_THIS_PACKAGE = (
    AnyformerRMSNorm,
    OffsetRMSNorm,
    PlainRMSNorm,
    AnyformerLayerNorm,
    UnbiasedLayerNorm,
    OffsetLayerNorm,
    PlainLayerNorm,
)


def build_norm(
    config: AnyformerConfig, size: int | tuple[int, ...] | None = None, eps: float | None = None
) -> nn.Module:
    """The norm that `config.norm` names, over `size` values (default: `hidden_size`)."""
    return NORMS[config.norm](size or config.hidden_size, config.norm_eps if eps is None else eps)
