"""The parts of a layer in words, read off the built module where it says more than the config."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...modeling.attention import AnyformerAttention, CrossAttention, GroupedQueryAttention
from ...modeling.mla import LatentAttention
from ...modeling.mlp import ClampedMLP, DenseMLP, FeedForward, GatedMLP
from ...modeling.moe import SparseMLP
from ...modeling.registry import MLPS, ROUTERS
from ...modeling.registry import NORMS as NORM_CLASSES
from .structure import Box

NORMS = {
    "rmsnorm": "RMSNorm",
    "rmsnorm_offset": "RMSNorm with 1 + weight",
    "rmsnorm_plain": "RMSNorm without a weight",
    "layernorm": "LayerNorm",
    "layernorm_nobias": "LayerNorm without a bias",
    "layernorm_offset": "LayerNorm with 1 + weight",
    "layernorm_plain": "LayerNorm without weight and bias",
}
ACTIVATIONS = {
    "silu": "SiLU",
    "swish": "SiLU",
    "gelu": "GELU",
    "gelu_new": "GELU by tanh",
    "gelu_pytorch_tanh": "GELU by tanh",
    "quick_gelu": "x · sigmoid(1.702 x)",
    "relu": "ReLU",
    "relu2": "ReLU²",
}
# The name of a gated block by its activation (Shazeer 2020, arXiv:2002.05202, sec. 2).
_GATED = {"silu": "SwiGLU", "swish": "SwiGLU", "relu": "ReGLU"}
QK_NORMS = {"head": "in each head, one weight for all", "separate": "in each head, a weight for each"}
QK_NORMS["full"] = "over all heads together"


def number(value: float) -> str:
    """4096 -> 4,096; 59.866518 -> 59.87."""
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def norm_box(norm: nn.Module, config: Any) -> Box:
    known = type(norm) is NORM_CLASSES[config.norm]
    return Box("norm", NORMS.get(config.norm, own(norm, "norm", config)) if known else type(norm).__name__)


def own(module: nn.Module, field: str, config: Any) -> str:
    """The name of a block that somebody registered, and the value that names it."""
    return f"{type(module).__name__} ({field}: {getattr(config, field)})"


def attention_box(attention: nn.Module, config: Any, place: int, positions: nn.Module) -> Box:
    """Self-attention of one layer.

    Args:
        place: of the layer in the patterns.
        positions: the stack's.
    """
    lines: list[str] = []
    if type(attention) is LatentAttention:
        title = "Multi-head latent attention"
        lines += _latents(config)
    elif type(attention) is GroupedQueryAttention:
        title = _heads_title(config)
        lines += [_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)]
    else:
        title = own(attention, "attention", config)
        lines += inside(attention)
    if isinstance(attention, AnyformerAttention):
        lines.append(_reach(attention, config))
    lines += _positions_in_attention(config, place, positions)
    if isinstance(attention, AnyformerAttention):
        lines += _details(attention, config)
    return Box("attention", title, tuple(lines))


def cross_box(cross: CrossAttention, config: Any) -> Box:
    lines = [_heads(config.num_attention_heads, config.num_key_value_heads, cross.head_dim)]
    lines += ["keys and values of the encoder's states", *_scores(config, cross.head_dim), *_biases(config)]
    return Box("cross", "Cross-attention", tuple(lines))


def _heads_title(config: Any) -> str:
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    return (
        "Multi-head attention"
        if heads == shared
        else ("Multi-query attention" if shared == 1 else "Grouped-query attention")
    )


def _heads(heads: int, shared: int, width: int) -> str:
    if heads == shared:
        return f"{heads} heads of {width}"
    return f"{heads} query heads of {width}, {shared} key/value head{'s' * (shared > 1)}"


def _latents(config: Any) -> Iterator[str]:
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    heads, values = config.num_attention_heads, config.v_head_dim
    yield f"{heads} heads: queries and keys of {nope} + {rope} rotated, values of {values}"
    yield f"keys and values from a latent of {config.kv_lora_rank:,}"
    if config.q_lora_rank is None:
        yield "queries directly from the stream"
    else:
        yield f"queries from a latent of {config.q_lora_rank:,}"


def _reach(attention: AnyformerAttention, config: Any) -> str:
    causal, window = attention.is_causal, config.sliding_window
    if attention.layer_type == "full_attention" or window is None:
        return "causal, all earlier tokens" if causal else "in both directions, the whole text"
    reach = f"causal, window of {window:,} tokens" if causal else f"in both directions, up to {window:,} tokens away"
    if attention.layer_type == "global_sliding_attention":
        reach += f" and the first {config.num_global_tokens:,}"
    return reach


def _positions_in_attention(config: Any, place: int, positions: nn.Module) -> Iterator[str]:
    kind = config.position_embedding
    if kind == "rope":
        rope = config.rope_of(place)
        yield "no rotation in this layer" if rope is None else rope_words(rope, config.position_layout)
    elif kind == "alibi":
        yield f"ALiBi, slopes down to 2^-{number(config.alibi_bias_max)}"
    elif kind == "relative":
        buckets, most = config.relative_attention_num_buckets, config.relative_attention_max_distance
        yield f"relative bias, {buckets} buckets up to {most} tokens, one table for all layers"
    elif getattr(positions, "adds_bias", False):
        yield f"a bias on the scores by {own(positions, 'position_embedding', config)}"


def rope_words(rope: dict[str, Any], layout: str) -> str:
    """Rotary parameters, every key of them."""
    said = [f"RoPE, base {number(rope['rope_theta'])}"]
    if (kind := rope.get("rope_type", "default")) != "default":
        said.append(f"scaled by {kind}")
    for key, value in rope.items():
        if key in ("rope_theta", "rope_type") or value is None:
            continue
        if key == "partial_rotary_factor":
            if value != 1:
                said.append(f"{value:.4g} of each head")
        elif isinstance(value, (list, tuple)):
            said.append(f"{key.replace('_', ' ')} of {len(value)} values")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            said.append(f"{_ROPE_KEYS.get(key, key.replace('_', ' '))} {number(value)}")
        else:
            said.append(f"{key.replace('_', ' ')} {value}")
    if layout == "interleaved":
        said.append("neighbouring values paired")
    return ", ".join(said)


_ROPE_KEYS = {"original_max_position_embeddings": "trained on", "max_position_embeddings": "longest"}


def _details(attention: AnyformerAttention, config: Any) -> Iterator[str]:
    """What the config adds to self-attention."""
    if isinstance(attention, GroupedQueryAttention):
        if config.qk_norm != "none":
            yield f"queries and keys normed {QK_NORMS[config.qk_norm]}"
        if config.clip_qkv is not None:
            yield f"queries, keys and values clipped at ±{number(config.clip_qkv)}"
    if attention.sinks is not None:
        yield "a learned sink in each head"
    width = config.qk_head_dim or config.head_dim
    yield from _scores(config, width)
    yield from _biases(config)


def _scores(config: Any, width: int) -> Iterator[str]:
    if config.attention_multiplier and config.attention_multiplier != width**-0.5:
        yield f"scores × {number(config.attention_multiplier)}, not 1/√{width}"
    if config.attn_logit_softcapping is not None:
        yield f"scores capped softly at {number(config.attn_logit_softcapping)}"


def _biases(config: Any) -> Iterator[str]:
    on = ["queries, keys, values"] * config.attention_bias + ["output"] * bool(config.attention_out_bias)
    if config.attention == "mla" and config.attention_bias:
        on[0] = "projections to the latents" if config.q_lora_rank else "projection to the latent"
    if on:
        yield f"bias on {' and '.join(on)}"


def mlp_box(mlp: nn.Module, config: Any) -> Box:
    """The feed-forward block of one layer, dense or sparse."""
    if not isinstance(mlp, SparseMLP):
        return Box("mlp", _mlp_title(mlp, config), tuple(_mlp_lines(mlp, config)))
    each = config.moe_intermediate_size
    block = MLPS[config.mlp]
    word = _block_word(block, config) or f"{block.__name__} (mlp: {config.mlp})"
    bias = ", with biases" if config.mlp_bias else ""
    lines = [
        f"{config.num_experts} experts, {config.num_experts_per_tok} for a token",
        f"each {word}, {config.hidden_size:,} → {each:,} → {config.hidden_size:,}{bias}",
    ]
    if mlp.shared_expert is not None:
        gate = ", weighted by a sigmoid gate" if mlp.shared_expert_gate is not None else ""
        lines.append(f"a shared expert for every token, width {config.shared_expert_intermediate_size:,}{gate}")
    lines += _router(mlp.router, config)
    return Box("mlp", "Mixture of experts", tuple(lines))


def _router(router: nn.Module, config: Any) -> Iterator[str]:
    known = {"softmax": "softmax over all experts", "sigmoid": "a sigmoid for each expert"}
    word = known.get(config.router) if type(router) is ROUTERS[config.router] else None
    extra = ", with a bias" if config.router_bias else ""
    yield f"router: {word or own(router, 'router', config)}{extra}"
    if config.n_group > 1:
        score = {"max": "best expert", "top2": "best two"}[config.group_score]
        yield f"from the best {config.topk_group} of {config.n_group} groups, by their {score}"
    if config.router_score_bias:
        rate = f", moved by {number(config.router_bias_update_rate)}" if config.router_bias_update_rate else ""
        yield f"a bias chooses but does not weigh{rate}"
    weights = ["weights sum to 1"] if config.norm_topk_prob else []
    if config.routed_scaling_factor != 1:
        weights.append(f"× {number(config.routed_scaling_factor)}")
    if weights:
        yield ", ".join(weights) if config.norm_topk_prob else f"weights {weights[0]}"


def _block_word(cls: type, config: Any) -> str | None:
    """A built-in feed-forward block in one word."""
    act = config.hidden_act
    if cls is GatedMLP:
        return _GATED.get(act) or ("GeGLU" if act.startswith("gelu") else f"gated {activation(act)}")
    if cls is ClampedMLP:
        return f"gated {activation(act)}, clamped at {number(config.swiglu_limit)}"
    return activation(act) if cls is DenseMLP else None


def activation(name: str) -> str:
    return ACTIVATIONS.get(name, name)


def _mlp_title(mlp: nn.Module, config: Any) -> str:
    word = _block_word(type(mlp), config)
    return f"Feed-forward, {word}" if word else own(mlp, "mlp", config)


def _mlp_lines(mlp: nn.Module, config: Any) -> Iterator[str]:
    if not isinstance(mlp, FeedForward):
        yield from inside(mlp)
        return
    hidden, inner = mlp.up_proj.in_features, mlp.up_proj.out_features
    yield f"{hidden:,} → {inner:,} → {hidden:,}"
    if type(mlp) is GatedMLP and config.hidden_act.startswith("gelu_"):
        yield activation(config.hidden_act)
    if config.mlp_bias:
        yield "with biases"


def inside(module: nn.Module) -> list[str]:
    """The modules of a block that nobody here knows, its own parameters with them."""
    said = [
        f"{name}: {_shape(child)}" for name, child in module.named_children() if any(True for _ in child.parameters())
    ]
    said += [f"{name}: {_sizes(p.shape)}" for name, p in module.named_parameters(recurse=False)]
    return said or ["no weights"]


def _shape(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"{module.in_features:,} → {module.out_features:,}{', bias' if module.bias is not None else ''}"
    return f"{type(module).__name__}, {sum(p.numel() for p in module.parameters()):,} weights"


def _sizes(shape: Any) -> str:
    return " × ".join(f"{size:,}" for size in shape) or "a number"
