"""Self-attention. The softmax itself is one of the library's attention functions, chosen by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_anyformer import AnyformerConfig
from .positions import apply_rotary
from .registry import ATTENTIONS


def eager_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scaling + mask) v (Vaswani et al. 2017, eq. 1), with the weights returned.

    Args:
        query: [batch, heads, q, head_dim]; key, value: [batch, kv_heads, k, head_dim].
        attention_mask: [batch, 1, q, k]: additive, or true (not 0) where the query may look.

    Returns:
        Output [batch, q, heads, head_dim] and weights [batch, heads, q, k].
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)  # [batch, heads, k, head_dim]
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None and attention_mask.is_floating_point():
        scores = scores + attention_mask
    elif attention_mask is not None:
        scores = scores.masked_fill(attention_mask == 0, torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class AnyformerAttention(nn.Module):
    """What the attention of every layer has in common: the place where the outputs are recorded."""


@ATTENTIONS.register("gqa")
class GroupedQueryAttention(AnyformerAttention):
    """Attention whose query heads share `num_key_value_heads` key/value heads.

    One key/value head a query head is multi-head attention (Vaswani et al. 2017), one for all is multi-query
    attention (Shazeer 2019, arXiv:1911.02150), anything between is grouped (Ainslie et al. 2023, arXiv:2305.13245).
    """

    def __init__(self, config: AnyformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        query_size = config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_out_bias)
        # A module, so that trainers that set the `p` of every nn.Dropout to 0 reach it.
        self.attn_dropout = nn.Dropout(config.attention_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[batch, length, hidden_size] -> the same; where eager computes them, the weights [batch, heads, q, k]."""
        input_shape = hidden_states.shape[:-1]
        head_shape = (
            *input_shape,
            -1,
            self.head_dim,
        )  # -1: under tensor parallelism a rank holds a share of heads
        query = self.q_proj(hidden_states).view(head_shape).transpose(1, 2)  # [batch, heads, length, head_dim]
        key = self.k_proj(hidden_states).view(head_shape).transpose(1, 2)  # [batch, kv_heads, length, head_dim]
        value = self.v_proj(hidden_states).view(head_shape).transpose(1, 2)
        if position_embeddings is not None:
            query, key = apply_rotary(query, key, *position_embeddings)
        if cache is not None:
            # The same kwargs go in and out: the paged cache of continuous batching writes its indices into them.
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)

        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attn_dropout.p if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*input_shape, -1).contiguous()), weights
