"""Transformer layers: how attention, feed-forward, norms and residuals are wired."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import CrossAttention
from .cache_layers import HeldKeys
from .configuration_anyformer import AnyformerConfig
from .mlp import GatedMLP  # noqa: F401  registers the feed-forward blocks
from .moe import SparseMLP
from .norms import build_norm
from .positions import Rotation
from .registry import ATTENTIONS, LAYERS, MLPS

Block = Callable[[torch.Tensor], torch.Tensor]


class AnyformerLayer(GradientCheckpointingLayer):
    """Self-attention, cross-attention where there is an encoder, feed-forward; a subclass places the norms.

    Attributes:
        norms: the names of the norms before and after attention, cross-attention and feed-forward.
    """

    norms: dict[str, tuple[str | None, str | None]]

    def __init__(self, config: AnyformerConfig, layer_idx: int, causal: bool = True, crosses: bool = False) -> None:
        super().__init__()
        # An encoder may be deeper than the decoder that the patterns are written for.
        self.place = place = layer_idx % config.num_hidden_layers
        self.layer_type = config.layer_types[place]
        self.residual_multiplier = config.residual_multiplier
        self.self_attn = ATTENTIONS[config.attention](config, layer_idx, causal, self.layer_type)
        self.cross_attn = CrossAttention(config, layer_idx) if crosses else None
        sparse = config.mlp_layer_types[place] == "sparse"
        self.mlp = SparseMLP(config) if sparse else MLPS[config.mlp](config)
        for block, names in self.norms.items():
            for name in names:
                if name is not None and (block != "cross" or crosses):
                    setattr(self, name, build_norm(config))
        if layer_idx == 0 and not config.first_norm:
            self.input_layernorm = nn.Identity()
        self.resid_dropout = nn.Dropout(config.hidden_dropout)

    def _norm(self, block: str, after: bool, hidden_states: torch.Tensor) -> torch.Tensor:
        name = self.norms[block][after]
        return hidden_states if name is None else getattr(self, name)(hidden_states)

    def _branch(self, output: torch.Tensor) -> torch.Tensor:
        output = self.resid_dropout(output)
        return output if self.residual_multiplier == 1 else output * self.residual_multiplier

    def add(self, name: str, block: Block, hidden_states: torch.Tensor) -> torch.Tensor:
        """The residual stream with what a block adds: norms within the branch."""
        output = self._norm(name, True, block(self._norm(name, False, hidden_states)))
        return hidden_states + self._branch(output)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        held_keys: torch.Tensor | None = None,
        held_values: torch.Tensor | None = None,
        *,
        attention_mask: dict[str, Any],
        position_embeddings: Rotation | None = None,
        cache: Cache | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """[batch, length, hidden_size] -> the same.

        Args:
            encoder_hidden_states: [batch, source, hidden_size], where there is an encoder.
            position_bias: [batch or 1, heads, length or 1, context], added to the scores.
            held_keys, held_values: [batch, heads, held, width], of earlier tokens, where checkpointing has no cache.
            attention_mask: by layer type.
            position_embeddings: this layer's cos and sin. The caller looks them up: what reads its layer's number here
                would be compiled anew for each layer.
            token_mask: [batch, length], true for real tokens: what routers count.
        """
        own: Any = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        if held_keys is not None and held_values is not None:
            own = HeldKeys(held_keys, held_values)

        def attention(x: torch.Tensor) -> torch.Tensor:
            return self.self_attn(
                x,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask[self.layer_type],
                position_bias=position_bias,
                cache=own,
                **kwargs,
            )[0]

        def cross(x: torch.Tensor) -> torch.Tensor:
            return self.cross_attn(x, encoder_hidden_states, encoder_attention_mask, cache, **kwargs)[0]

        def feed_forward(x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x, token_mask) if isinstance(self.mlp, SparseMLP) else self.mlp(x)

        return self.wire(hidden_states, attention, cross if self.cross_attn is not None else None, feed_forward)

    def wire(self, hidden_states: torch.Tensor, attention: Block, cross: Block | None, mlp: Block) -> torch.Tensor:
        """One block after the other."""
        hidden_states = self.add("attention", attention, hidden_states)
        if cross is not None:
            hidden_states = self.add("cross", cross, hidden_states)
        return self.add("mlp", mlp, hidden_states)


@LAYERS.register("pre")
class PreNormLayer(AnyformerLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)) (Xiong et al. 2020, arXiv:2002.04745, fig. 1b)."""

    norms = {  # noqa: RUF012
        "attention": ("input_layernorm", None),
        "cross": ("cross_attention_layernorm", None),
        "mlp": ("post_attention_layernorm", None),
    }


@LAYERS.register("post")
class PostNormLayer(AnyformerLayer):
    """norm(x + attention(x)), then norm(x + mlp(x)) (Vaswani et al. 2017, arXiv:1706.03762, sec. 3.1; BERT)."""

    norms = {  # noqa: RUF012
        "attention": (None, "post_attention_layernorm"),
        "cross": (None, "cross_attention_layernorm"),
        "mlp": (None, "post_feedforward_layernorm"),
    }

    def add(self, name: str, block: Block, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._norm(name, True, hidden_states + self._branch(block(hidden_states)))


@LAYERS.register("sandwich")
class SandwichNormLayer(AnyformerLayer):
    """x + norm(attention(norm(x))), the same for the mlp (Ding et al. 2021, arXiv:2105.13290; Gemma 2)."""

    norms = {  # noqa: RUF012
        "attention": ("input_layernorm", "post_attention_layernorm"),
        "cross": ("cross_attention_layernorm", "post_cross_attention_layernorm"),
        "mlp": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    }


@LAYERS.register("branch")
class BranchNormLayer(AnyformerLayer):
    """x + norm(attention(x)), then x + norm(mlp(x)) (OLMo 2, arXiv:2501.00656, sec. 3.2)."""

    norms = {  # noqa: RUF012
        "attention": (None, "post_attention_layernorm"),
        "cross": (None, "cross_attention_layernorm"),
        "mlp": (None, "post_feedforward_layernorm"),
    }


@LAYERS.register("parallel")
class ParallelLayer(AnyformerLayer):
    """x + attention(norm(x)) + mlp(norm(x)) with one norm (GPT-J; PaLM, arXiv:2204.02311, sec. 2)."""

    norms = {"attention": ("input_layernorm", None), "mlp": (None, None)}  # noqa: RUF012

    def wire(self, hidden_states: torch.Tensor, attention: Block, cross: Block | None, mlp: Block) -> torch.Tensor:
        normed = self._norm("attention", False, hidden_states)
        return hidden_states + self._branch(attention(normed)) + self._branch(mlp(normed))


@LAYERS.register("parallel_dual")
class DualParallelLayer(AnyformerLayer):
    """x + attention(norm1(x)) + mlp(norm2(x)) (GPT-NeoX, arXiv:2204.06745, sec. 2.1)."""

    norms = {"attention": ("input_layernorm", None), "mlp": ("post_attention_layernorm", None)}  # noqa: RUF012

    def wire(self, hidden_states: torch.Tensor, attention: Block, cross: Block | None, mlp: Block) -> torch.Tensor:
        attended = self._branch(attention(self._norm("attention", False, hidden_states)))
        return hidden_states + attended + self._branch(mlp(self._norm("mlp", False, hidden_states)))
