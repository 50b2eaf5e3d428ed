"""Normalisation layers, over the last dimension: [..., size] -> [..., size]."""

import torch
from torch import nn

from .configuration_anyformer import AnyformerConfig
from .registry import NORMS


@NORMS.register("rmsnorm")
class AnyformerRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4), computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


@NORMS.register("layernorm")
class AnyformerLayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps=eps)


def build_norm(config: AnyformerConfig, size: int | None = None) -> nn.Module:
    """The norm that `config.norm` names, over `size` values (default: `hidden_size`)."""
    return NORMS[config.norm](size or config.hidden_size, config.norm_eps)
