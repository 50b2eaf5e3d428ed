"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, sec. 2.1)."""

import math
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.import_utils import is_tracing

from .attention import AnyformerAttention, softmax_of_scores
from .configuration_anyformer import AnyformerConfig
from .linear import NARROW, project
from .norms import build_norm
from .paged import is_paged
from .plain import is_plain
from .positions import Rotation, apply_rotary
from .registry import ATTENTIONS

# DeepSeek's norms of the latents have this epsilon whatever the others have.
LATENT_EPS = 1e-6


@ATTENTIONS.register("mla")
class LatentAttention(AnyformerAttention):
    """Keys and values of all heads come from one latent vector a token; the cache holds it and one rotary key.

    While decoding, the up-projection of keys is multiplied into the query and that of values into the output
    ("absorbed", sec. 2.1.2), so that the latents of the context are read as they are. Keys and values are expanded
    where that costs less (many queries), where the projection is no plain `nn.Linear` (an adapter, quantised weights,
    hooks), and for attention functions other than eager and sdpa, which want to see keys and values.
    """

    def __init__(self, config: AnyformerConfig, layer_idx: int, causal: bool = True, layer_type: str = "") -> None:
        super().__init__(config, layer_idx, causal, layer_type)
        self.heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.nope_dim, self.rope_dim, self.value_dim = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        self.scaling = config.attention_multiplier or config.qk_head_dim**-0.5 * _yarn_factor(
            config, layer_idx % config.num_hidden_layers
        )
        hidden, key_dim = config.hidden_size, config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, self.heads * key_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=config.attention_bias)
            self.q_a_layernorm = build_norm(config, config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * key_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope_dim, bias=config.attention_bias)
        self.kv_a_layernorm = build_norm(config, self.rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope_dim + self.value_dim), bias=False)
        self._project_out(self.heads * self.value_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation | None = None,
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[batch, length, hidden_size] -> the same; where they are computed here, the weights [batch, heads, q, k]."""
        if self.config.q_lora_rank is None:
            query = project(self.q_proj, hidden_states)
        else:
            query = project(self.q_b_proj, self.q_a_layernorm(project(self.q_a_proj, hidden_states)))
        query = query.unflatten(-1, (-1, self.nope_dim + self.rope_dim)).transpose(1, 2)
        nope, rope = query.split((self.nope_dim, self.rope_dim), dim=-1)  # [batch, heads, length, ...]
        latent, rope_key = project(self.kv_a_proj_with_mqa, hidden_states).split((self.rank, self.rope_dim), dim=-1)
        latent = self.kv_a_layernorm(latent).unsqueeze(1)  # [batch, 1, length, kv_lora_rank]
        rope_key = rope_key.unsqueeze(1)  # [batch, 1, length, qk_rope_head_dim]
        if position_embeddings is not None:
            rope = apply_rotary(rope, *position_embeddings, self.interleaved)
            rope_key = apply_rotary(rope_key, *position_embeddings, self.interleaved)
        if cache is not None:
            self._check_cache(cache)
            latent, rope_key = self._update(cache, latent, rope_key, kwargs)
        if cache is not None and self._absorbing_pays(nope.shape[2], latent.shape[2], attention_mask):
            return self._absorbed(nope, rope, latent, rope_key, attention_mask)
        return self._expanded(nope, rope, latent, rope_key, attention_mask, **kwargs)

    def _update(
        self, cache: Cache, latent: torch.Tensor, rope_key: torch.Tensor, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The latents and rotary keys of the whole context; the new ones are kept."""
        if not is_paged(cache):
            return cache.update(latent, rope_key, self.layer_idx, kwargs=kwargs)
        width = max(self.rank, self.rope_dim)  # pages hold two tensors of one width
        latent, rope_key = (nn.functional.pad(x, (0, width - x.shape[-1])) for x in (latent, rope_key))
        latent, rope_key = cache.update(latent, rope_key, self.layer_idx, kwargs=kwargs)
        return latent[..., : self.rank], rope_key[..., : self.rope_dim]

    def _check_cache(self, cache: Cache) -> None:
        layer = cache.layers[self.layer_idx] if self.layer_idx < len(getattr(cache, "layers", ())) else None
        kept = getattr(layer, "keys", None)
        if isinstance(kept, torch.Tensor) and kept.dim() == 4 and kept.shape[-1] not in (0, self.rank):
            raise ValueError(
                f"the cache holds keys of width {kept.shape[-1]} where attention='mla' keeps latents of kv_lora_rank="
                f"{self.rank}: prefix tuning has no place in it; use prompt tuning or LoRA"
            )

    def _expanded(
        self, nope: torch.Tensor, rope: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor, mask: Any, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        pair = (
            project(self.kv_b_proj, latent.squeeze(1))
            .unflatten(-1, (-1, self.nope_dim + self.value_dim))
            .transpose(1, 2)
        )
        key, value = pair.split((self.nope_dim, self.value_dim), dim=-1)  # [batch, heads, context, ...]
        key = torch.cat((key, rope_key.expand(-1, key.shape[1], -1, -1)), dim=-1)
        return self.attend(torch.cat((nope, rope), dim=-1), key, value, mask, **kwargs)

    def _absorbing_pays(self, queries: int, context: int, mask: Any) -> bool:
        known = self.config._attn_implementation in (None, "eager", "paged|eager", "sdpa")
        if not known or not is_plain(self.kv_b_proj) or not (mask is None or isinstance(mask, torch.Tensor)):
            return False
        # Multiplications a head beside those that both ways share.
        both = self.nope_dim + self.value_dim
        expanded = context * self.rank * both + queries * context * (both + self.rope_dim)
        absorbed = queries * self.rank * both + queries * context * (2 * self.rank + self.rope_dim)
        return absorbed < expanded

    def _absorbed(
        self,
        nope: torch.Tensor,
        rope: torch.Tensor,
        latent: torch.Tensor,
        rope_key: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, _, queries, _ = nope.shape
        up = self.kv_b_proj.weight.view(-1, self.nope_dim + self.value_dim, self.rank)
        up_key, up_value = up.split((self.nope_dim, self.value_dim), dim=1)  # [heads, ..., kv_lora_rank]
        # einsum, because matmul would copy the weights once for each row of the batch.
        query = torch.einsum("bhqn,hnr->bhqr", nope, up_key)
        # One product over all heads reads each latent once.
        scores = _with_each(query.flatten(1, 2), latent.squeeze(1))
        scores = scores + _with_each(rope.flatten(1, 2), rope_key.squeeze(1))
        scores = scores.view(batch, -1, queries, latent.shape[2]) * self.scaling
        if mask is None and queries > 1 and self.is_causal:
            # The library leaves this mask to its kernels, and only where the cache was empty: the first query is the
            # first key, and a static cache has unused places behind the last.
            mask = torch.ones(queries, scores.shape[-1], dtype=torch.bool, device=scores.device).tril()
        weights = softmax_of_scores(scores, mask, None, self.config.attn_logit_softcapping, self.sinks)
        weights = self.attn_dropout(weights.to(query.dtype))
        seen = _sum_of(weights.flatten(1, 2), latent.squeeze(1)).view_as(query)
        output = _with_each(seen.transpose(0, 1).flatten(1, 2), up_value).unflatten(1, (batch, queries))
        return project(self.o_proj, output.permute(1, 2, 0, 3).flatten(2)), weights


def _with_each(queries: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Products of queries [batch, n, width] with all that is kept [batch, context, width]: [batch, n, context]."""
    if _is_copied(kept):
        return torch.stack([nn.functional.linear(x, rows) for x, rows in zip(queries, kept, strict=True)])
    return torch.matmul(queries, kept.transpose(1, 2))


def _sum_of(weights: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Sums with weights [batch, n, context] of what is kept [batch, context, width]: [batch, n, width]."""
    if _is_copied(kept):
        return torch.stack([torch.mm(x, rows) for x, rows in zip(weights, kept, strict=True)])
    return torch.matmul(weights, kept)


def _is_copied(kept: torch.Tensor) -> bool:
    """Whether torch's product of batches would copy what is kept, which takes many times as long as the product: in 16
    bits on CPUs, what is transposed, and rows of a batch that do not follow each other, as in a buffer with room."""
    return kept.device.type == "cpu" and kept.dtype in NARROW and not is_tracing(kept)


def _yarn_factor(config: AnyformerConfig, layer: int) -> float:
    """What YaRN adds to the scale of the scores: (0.1 mscale_all_dim ln(factor) + 1)^2, as DeepSeek-V2 and V3 do."""
    rope = config.rope_of(layer) or {}
    scale, factor = rope.get("mscale_all_dim"), rope.get("factor", 1.0)
    if rope.get("rope_type") != "yarn" or not scale or factor <= 1:
        return 1.0
    return (0.1 * scale * math.log(factor) + 1.0) ** 2
