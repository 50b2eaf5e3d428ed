"""Transformer layers: how attention, feed-forward, norms and residuals are wired."""

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_anyformer import AnyformerConfig
from .norms import build_norm
from .registry import ATTENTIONS, LAYERS, MLPS


class AnyformerLayer(GradientCheckpointingLayer):
    """The parts of every layer; a subclass wires them in `forward`."""

    def __init__(self, config: AnyformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = ATTENTIONS[config.attention](config, layer_idx)
        self.mlp = MLPS[config.mlp](config)
        self.input_layernorm = build_norm(config)
        self.post_attention_layernorm = build_norm(config)
        self.resid_dropout = nn.Dropout(config.hidden_dropout)


@LAYERS.register("pre")
class PreNormLayer(AnyformerLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)) (Xiong et al. 2020, arXiv:2002.04745, fig. 1b)."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """[batch, length, hidden_size] -> [batch, length, hidden_size]."""
        attention, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            cache=cache,
            **kwargs,
        )
        hidden_states = hidden_states + self.resid_dropout(attention)
        return hidden_states + self.resid_dropout(self.mlp(self.post_attention_layernorm(hidden_states)))
