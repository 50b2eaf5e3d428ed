"""Attention. The softmax itself is one of the library's attention functions, chosen by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_anyformer import AnyformerConfig
from .grouped import grouped_sdpa, shares_keys
from .inference import serves
from .linear import project, project_all
from .norms import build_norm
from .paged_attention import by_request, separates_requests
from .positions import Rotation, apply_rotary
from .registry import ATTENTIONS


def softmax_of_scores(
    scores: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention weights [batch, heads, q, k] in fp32.

    Args:
        scores: [batch, heads, q, k], scaled.
        attention_mask: [batch, 1, q, k]: additive, or true (not 0) where the query may look.
        position_bias: [batch or 1, heads, q or 1, k], added.
        softcap: c of c * tanh(scores / c) (Gemma 2, arXiv:2408.00118, sec. 2).
        sinks: [heads], a logit without a value that takes a share of the weights (GPT-OSS, arXiv:2508.10925).
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None and attention_mask.is_floating_point():
        scores = scores + attention_mask
    elif attention_mask is not None:
        scores = scores.masked_fill(attention_mask == 0, torch.finfo(scores.dtype).min)
    if sinks is None:
        return nn.functional.softmax(scores, dim=-1, dtype=torch.float32)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
    return nn.functional.softmax(torch.cat((scores, column), dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


def eager_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scaling + mask) v (Vaswani et al. 2017, eq. 1), with the weights returned.

    Args:
        query: [batch, heads, q, head_dim]; key, value: [batch, kv_heads, k, head_dim].
        attention_mask, position_bias, softcap, s_aux: see `softmax_of_scores`.

    Returns:
        Output [batch, q, heads, head_dim] and weights [batch, heads, q, k].
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)  # [batch, heads, k, head_dim]
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = softmax_of_scores(scores, attention_mask, position_bias, softcap, s_aux).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class AttentionBase(nn.Module):
    """What self-attention and cross-attention share: sizes, output projection, the call of an attention function.

    Args:
        causal: queries see only keys before them.
    """

    def __init__(self, config: AnyformerConfig, layer_idx: int, causal: bool) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, causal
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.attention_multiplier or self.head_dim**-0.5
        self.softcap = config.attn_logit_softcapping
        # A module, so that trainers that set the `p` of every nn.Dropout to 0 reach it.
        self.attn_dropout = nn.Dropout(config.attention_dropout)

    def _project_out(self, inputs: int) -> None:
        self.o_proj = nn.Linear(inputs, self.config.hidden_size, bias=self.config.attention_out_bias)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        position_bias: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Heads [batch, heads, length, head_dim] to the output [batch, q, hidden_size] and, from eager, the weights."""
        implementation = self.config._attn_implementation
        attend: Callable = eager_attention_forward
        if implementation != "paged|eager":  # the library's knows neither biases nor soft caps
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if attend is sdpa_attention_forward and shares_keys(query, self.num_key_value_groups):
            attend = grouped_sdpa
        if position_bias is not None:
            if implementation == "flex_attention":  # it looks up each element
                position_bias = position_bias.expand(query.shape[0], -1, query.shape[2], -1)
            kwargs["position_bias"] = position_bias.to(query.dtype)
        if self.softcap is not None:
            kwargs["softcap"] = self.softcap
        width = value.shape[-1]
        if attend is sdpa_attention_forward and width < query.shape[-1] and serves(value):
            # Where widths differ, torch takes the way that writes all scores down.
            value = nn.functional.pad(value, (0, query.shape[-1] - width))
        row = "write_index" in kwargs and isinstance(attention_mask, torch.Tensor)  # of many requests
        if row and separates_requests(query):
            attend = by_request(attend, kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
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
        if output.shape[-1] > width:
            output = output[..., :width]
        return project(self.o_proj, output.reshape(*output.shape[:2], -1).contiguous()), weights


class AnyformerAttention(AttentionBase):
    """Self-attention; a subclass makes queries, keys and values."""

    def __init__(self, config: AnyformerConfig, layer_idx: int, causal: bool = True, layer_type: str = "") -> None:
        super().__init__(config, layer_idx, causal)
        self.layer_type = layer_type
        self.sliding_window = config.sliding_window if layer_type == "sliding_attention" else None
        self.interleaved = config.position_layout == "interleaved"
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sinks else None

    def attend(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.sinks is not None:
            kwargs["s_aux"] = self.sinks
        if self.sliding_window is not None:
            kwargs["sliding_window"] = self.sliding_window
        return super().attend(*args, **kwargs)


@ATTENTIONS.register("gqa")
class GroupedQueryAttention(AnyformerAttention):
    """Attention whose query heads share `num_key_value_heads` key/value heads.

    One key/value head a query head is multi-head attention (Vaswani et al. 2017), one for all is multi-query
    attention (Shazeer 2019, arXiv:1911.02150), anything between is grouped (Ainslie et al. 2023, arXiv:2305.13245).
    """

    def __init__(self, config: AnyformerConfig, layer_idx: int, causal: bool = True, layer_type: str = "") -> None:
        super().__init__(config, layer_idx, causal, layer_type)
        query_size = config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self._project_out(query_size)
        self.clip = config.clip_qkv
        self.q_norm, self.k_norm = (
            self._head_norm(n) for n in (config.num_attention_heads, config.num_key_value_heads)
        )

    def _head_norm(self, heads: int) -> nn.Module | None:
        """QK-norm (Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442)."""
        sizes: dict[str, Any] = {"head": self.head_dim, "separate": (heads, self.head_dim)}
        sizes["full"] = heads * self.head_dim
        return None if self.config.qk_norm == "none" else build_norm(self.config, sizes[self.config.qk_norm])

    def _heads(self, projected: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        """[batch, length, heads * head_dim] -> [batch, heads, length, head_dim], normed and clipped."""
        if norm is not None and self.config.qk_norm == "full":
            projected = norm(projected)
        # -1: under tensor parallelism a rank holds a share of heads
        heads = projected.view(*projected.shape[:-1], -1, self.head_dim)
        if norm is not None and self.config.qk_norm != "full":
            heads = norm(heads)
        if self.clip is not None:
            heads = heads.clamp(-self.clip, self.clip)
        return heads.transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[batch, length, hidden_size] -> the same; where eager computes them, the weights [batch, heads, q, k]."""
        query, key, value = project_all((self.q_proj, self.k_proj, self.v_proj), hidden_states)
        query = self._heads(query, self.q_norm)  # [batch, heads, length, head_dim]
        key, value = self._heads(key, self.k_norm), self._heads(value)  # [batch, kv_heads, length, head_dim]
        if position_embeddings is not None:
            query = apply_rotary(query, *position_embeddings, self.interleaved)
            key = apply_rotary(key, *position_embeddings, self.interleaved)
        if cache is not None:
            # The same kwargs go in and out: the paged cache of continuous batching writes its indices into them.
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        return self.attend(query, key, value, attention_mask, **kwargs)


class CrossAttention(AttentionBase):
    """Decoder queries over the encoder's output, whose keys and values are computed once and cached."""

    def __init__(self, config: AnyformerConfig, layer_idx: int) -> None:
        # Heads as in "gqa" whatever the self-attention is: the latent kind saves a cache that does not grow here.
        super().__init__(config, layer_idx, causal=False)
        if config.attention == "mla":
            self.head_dim = config.qk_head_dim
            self.scaling = config.attention_multiplier or self.head_dim**-0.5
        query_size = config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self._project_out(query_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[batch, length, hidden_size] over encoder states [batch, source, hidden_size] -> the first shape."""

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)

        query = heads(project(self.q_proj, hidden_states))  # [batch, heads, length, head_dim]
        kept = cache if isinstance(cache, EncoderDecoderCache) else None
        if kept is not None and kept.is_updated.get(self.layer_idx):
            layer: Any = kept.cross_attention_cache.layers[self.layer_idx]
            key, value = layer.keys, layer.values
        else:
            key, value = map(heads, project_all((self.k_proj, self.v_proj), encoder_hidden_states))
            if kept is not None:
                key, value = kept.cross_attention_cache.update(key, value, self.layer_idx)
                kept.is_updated[self.layer_idx] = True
        return self.attend(query, key, value, attention_mask, **kwargs)
