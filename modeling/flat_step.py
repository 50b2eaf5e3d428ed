"""The way of few tokens through the layers of a common decoder, written flat.

Between two products a generated token leaves the processor's caches to the weights, so that each call of Python and of
torch costs several times what it costs in a loop of its own. `AnyformerLayer` makes some hundred of them; what is
written here makes the same products, norms and rotations with the fewest, and in 16 bits rounds less often. Only
generation comes here, and only where every module is one whose `forward` is known and has no hooks; all else goes
through the modules.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from .attention import GroupedQueryAttention
from .grouped import grouped_sdpa
from .growing_cache import GrowingCache
from .inference import FEW_ROWS, GENERATION, Product, serves
from .layers import PreNormLayer
from .mlp import ClampedMLP, DenseMLP, GatedMLP
from .norms import NORMS_OF_THIS_PACKAGE
from .paged_attention import RequestBatch, RequestLayer
from .positions import Rotation, rotary_of


class FlatLayer:
    """One layer, taken apart."""

    def __init__(self, layer: Any, products: dict[str, Product]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.place, self.kind, self.index = layer.place, layer.layer_type, attention.layer_idx
        self.scale, self.residual = attention.scaling, layer.residual_multiplier
        self.head_dim, self.clip, self.interleaved = attention.head_dim, attention.clip, attention.interleaved
        self.input_norm, self.middle_norm = _ways(layer.input_layernorm), _ways(layer.post_attention_layernorm)
        self.q_norm, self.k_norm = (
            None if norm is None else norm.forward for norm in (attention.q_norm, attention.k_norm)
        )
        self.attention = attention
        self.qkv, self.out, self.up, self.down = (products[name] for name in ("qkv", "out", "up", "down"))
        shared = self.qkv.sizes[1] // self.head_dim
        self.heads = self.qkv.sizes[0] // self.head_dim, shared, shared
        self.both = self.heads[0] + shared, shared
        self.act_fn, self.limit = mlp.act_fn, mlp.limit
        self.combine = mlp.combine if mlp.has_gate else None
        self.pair = 2 * [mlp.up_proj.out_features]

    def attend(self, states: torch.Tensor, rotate: Callable | None, mask: Any, cached: Any) -> torch.Tensor:
        """[batch, length, hidden_size] -> the same; `GroupedQueryAttention.forward`."""
        batch, length, _ = states.shape
        heads = self.qkv(states)  # [batch, length, (heads + 2 kv_heads) * head_dim]
        if length == 1:  # which is as good as transposed
            heads = heads.view(batch, -1, 1, self.head_dim)
        else:
            heads = heads.view(batch, length, -1, self.head_dim).transpose(1, 2)
        if self.q_norm is None and self.k_norm is None and self.clip is None:
            both, value = heads.split_with_sizes(self.both, dim=1)
            query, key = (both if rotate is None else rotate(both)).split_with_sizes(self.heads[:2], dim=1)
        else:
            query, key, value = heads.split_with_sizes(self.heads, dim=1)
            query, key = (x if norm is None else norm(x) for x, norm in ((query, self.q_norm), (key, self.k_norm)))
            if self.clip is not None:
                query, key, value = (x.clamp(-self.clip, self.clip) for x in (query, key, value))
            if rotate is not None:
                query, key = rotate(query), rotate(key)
        shared = self.heads[1]
        if type(cached) is RequestLayer:
            output = cached.attend(query.reshape(batch, shared, -1, self.head_dim), key, value, mask, self.scale)
            return self.out(output.reshape(batch, 1, -1))
        key, value = cached.update(key, value)
        if length > 1:
            output, _ = grouped_sdpa(self.attention, query, key, value, mask, scaling=self.scale)
            return self.out(output.flatten(2))
        # The heads of a group are the queries of one head: see `grouped_sdpa`.
        query = query.reshape(batch, shared, -1, self.head_dim)
        output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)
        return self.out(output.reshape(batch, 1, -1))

    def feed(self, states: torch.Tensor) -> torch.Tensor:
        """[batch, length, hidden_size] -> the same; the `forward` of `GatedMLP` and `DenseMLP`."""
        inner = self.up(states)
        if self.combine is None:
            return self.down(self.act_fn(inner))
        gate, up = inner.split_with_sizes(self.pair, dim=-1)
        return self.down(self.combine(gate, up, self.act_fn, self.limit))

    def __call__(self, states: torch.Tensor, rotate: Callable | None, mask: Any, cached: Any) -> torch.Tensor:
        """`PreNormLayer.forward`."""
        single = states.shape[0] == states.shape[1] == 1
        added = self.attend(self.input_norm[single](states), rotate, mask, cached)
        states = states + (added if self.residual == 1 else added * self.residual)
        added = self.feed(self.middle_norm[single](states))
        return states + (added if self.residual == 1 else added * self.residual)


def _ways(norm: Any) -> tuple[Callable, Callable]:
    """A norm of any rows, and of a single one."""
    return norm.forward, getattr(norm, "of_row", norm.forward)


def run_flat(
    layers: Sequence[FlatLayer], states: torch.Tensor, rotations: Mapping[Any, Rotation], masks: Any, cache: Any
) -> torch.Tensor:
    """[batch, length, hidden_size] -> the same, behind all layers.

    Args:
        rotations: by place; masks: by type of layer.
    """
    ways: dict[tuple[int, bool], Callable] = {}  # layers share their rotations
    for layer, cached in zip(layers, cache.layers, strict=True):
        rotate = None
        if (rotation := rotations.get(layer.place)) is not None:
            key = id(rotation), layer.interleaved
            rotate = ways.get(key) or ways.setdefault(key, rotary_of(rotation, layer.head_dim, layer.interleaved))
        states = layer(states, rotate, masks[layer.kind], cached)
    return states


def flat_layers(stack: Any, states: torch.Tensor, cache: Any) -> list[FlatLayer] | None:
    """The layers of a decoder for a step of generation, taken apart once a text; None: it goes through the modules.

    Args:
        states: [batch, length, hidden_size].
    """
    # First what a compiler knows: it cannot read what belongs to a thread.
    if not serves(states) or not GENERATION.texts or type(cache) not in (GrowingCache, DynamicCache, RequestBatch):
        return None
    if states.shape[:-1].numel() > FEW_ROWS or getattr(cache, "offloading", False) or not cache.get_seq_length():
        return None
    return GENERATION.prepared(stack, _taken_apart)


def _taken_apart(stack: Any) -> list[FlatLayer] | None:
    if stack.training or stack.config._attn_implementation != "sdpa" or stack.positions.adds_bias:
        return None
    flat = []
    for layer in stack.layers:
        products = _products_of(layer) if _is_known(layer) else None
        if products is None:
            return None
        flat.append(FlatLayer(layer, products))
    return flat


def _is_known(layer: Any) -> bool:
    """Whether a layer's `forward`, and those of all its modules, are the ones that are written out here."""
    if type(layer) is not PreNormLayer or layer.cross_attn is not None:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not GroupedQueryAttention or attention.sinks is not None or attention.softcap is not None:
        return False
    if attention.config.qk_norm not in ("none", "head") or type(mlp) not in (GatedMLP, DenseMLP, ClampedMLP):
        return False
    norms = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
    if any(norm is not None and type(norm) not in (*NORMS_OF_THIS_PACKAGE, nn.Identity) for norm in norms):
        return False
    return not any(_is_touched(module) for module in layer.modules())


def _is_touched(module: nn.Module) -> bool:
    """Whether somebody wants to see or change what a module does."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def _products_of(layer: Any) -> dict[str, Any] | None:
    attention, mlp = layer.self_attn, layer.mlp
    groups = {
        "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
        "out": (attention.o_proj,),
        "up": (mlp.gate_proj, mlp.up_proj) if mlp.has_gate else (mlp.up_proj,),
        "down": (mlp.down_proj,),
    }
    products = {name: GENERATION.product(layers) for name, layers in groups.items()}
    return None if any(product is None for product in products.values()) else products
