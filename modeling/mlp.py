"""Feed-forward blocks: [batch, length, hidden_size] -> [batch, length, hidden_size]."""

import torch
from torch import nn
from transformers.activations import ACT2FN

from .configuration_anyformer import AnyformerConfig
from .registry import MLPS


@MLPS.register("gated")
class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): SwiGLU, GeGLU, ReGLU by `hidden_act` (Shazeer 2020, arXiv:2002.05202, eq. 6)."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


@MLPS.register("dense")
class DenseMLP(nn.Module):
    """down(act(up(x))): the feed-forward network of Vaswani et al. 2017 (arXiv:1706.03762, eq. 2)."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))
