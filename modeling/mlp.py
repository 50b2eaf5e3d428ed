"""Feed-forward blocks: [batch, length, hidden_size] -> [batch, length, hidden_size]."""

from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN

from .configuration_anyformer import AnyformerConfig
from .linear import project, project_all
from .registry import MLPS

Activation = Callable[[torch.Tensor], torch.Tensor]


class FeedForward(nn.Module):
    """The projections of a feed-forward block; experts read the same two attributes.

    Args:
        size: inner width; default `intermediate_size`.

    Attributes:
        has_gate: a gate stands beside the up projection, and `combine` joins them.
    """

    has_gate = False

    def __init__(self, config: AnyformerConfig, size: int | None = None) -> None:
        super().__init__()
        size = size or config.intermediate_size
        if self.has_gate:
            self.gate_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.act_dropout = nn.Dropout(config.activation_dropout)
        self.limit = config.swiglu_limit


@MLPS.register("dense")
class DenseMLP(FeedForward):
    """down(act(up(x))): the feed-forward network of Vaswani et al. 2017 (arXiv:1706.03762, eq. 2)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return project(self.down_proj, self.act_dropout(self.act_fn(project(self.up_proj, hidden_states))))


@MLPS.register("gated")
class GatedMLP(FeedForward):
    """down(act(gate(x)) * up(x)): SwiGLU, GeGLU, ReGLU by `hidden_act` (Shazeer 2020, arXiv:2002.05202, eq. 6)."""

    has_gate = True

    @staticmethod
    def combine(gate: torch.Tensor, up: torch.Tensor, act_fn: Activation, limit: float) -> torch.Tensor:
        """What goes into the down projection."""
        return act_fn(gate) * up

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = project_all((self.gate_proj, self.up_proj), hidden_states)
        inner = self.combine(gate, up, self.act_fn, self.limit)
        return project(self.down_proj, self.act_dropout(inner))


@MLPS.register("clamped")
class ClampedMLP(GatedMLP):
    """The gate of GPT-OSS (arXiv:2508.10925): act(min(gate, limit)) * (clip(up, limit) + 1), `swiglu_limit` the bound.

    With `hidden_act` "quick_gelu", x * sigmoid(1.702 x), it is the published one.
    """

    @staticmethod
    def combine(gate: torch.Tensor, up: torch.Tensor, act_fn: Activation, limit: float) -> torch.Tensor:
        return act_fn(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1)
