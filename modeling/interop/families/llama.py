"""Llama 1 to 3 and what is built like them, as SmolLM and TinyLlama (Touvron et al. 2023, arXiv:2302.13971)."""

from collections.abc import Mapping
from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family, layers

# What most decoders since Llama share; their files start from these.
CONFIG_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rope_parameters": "rope_parameters",
    "norm_eps": "rms_norm_eps",
    "hidden_act": "hidden_act",
    "attention_dropout": "attention_dropout",
}
HEADS = {
    "causal_lm": "{}ForCausalLM",
    "base": "{}Model",
    "sequence_classification": "{}ForSequenceClassification",
    "token_classification": "{}ForTokenClassification",
    "question_answering": "{}ForQuestionAnswering",
}
ATTENTION = tuple(f"self_attn.{projection}_proj.{kind}" for projection in "qkvo" for kind in ("weight", "bias"))
MLP = tuple(f"mlp.{projection}_proj.{kind}" for projection in ("gate", "up", "down") for kind in ("weight", "bias"))
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
OUTSIDE = {
    name: name
    for name in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "score.weight",
        "score.bias",
        "qa_outputs.weight",
        "qa_outputs.bias",
    )
}
WEIGHTS = OUTSIDE | layers((*ATTENTION, *MLP, *NORMS))
FIXED = {
    "attention": "gqa",
    "position_embedding": "rope",
    "norm": "rmsnorm",
    "norm_position": "pre",
    "mlp": "gated",
    "lm_head_bias": False,
    "hidden_dropout": 0.0,
    "embedding_dropout": 0.0,
}


def heads(name: str, *which: str) -> dict[str, str]:
    """Stock classes of a decoder by our head: `heads("Llama")`; `which` limits them, default all."""
    return {head: cls.format(name) for head, cls in HEADS.items() if not which or head in which}


def without(fields: Mapping[str, Any], *ours: str) -> dict[str, Any]:
    """`fields` without those of ours, for a class that lacks or computes them."""
    return {name: theirs for name, theirs in fields.items() if name not in ours}


def unstated_head_dim(foreign: Any) -> dict[str, Any]:
    """For a config class without the field `head_dim`: its model still obeys it where a checkpoint states one."""
    return {"head_dim": getattr(foreign, "head_dim", None)}


def head_dim_if_needed(config: AnyformerConfig) -> dict[str, Any]:
    """The foreign side of `unstated_head_dim`."""
    follows = config.head_dim == config.hidden_size // config.num_attention_heads
    return {} if follows else {"head_dim": config.head_dim}


def window(foreign: Any) -> dict[str, Any]:
    """Layer types and window; a window that no layer has says nothing, and ours does not keep it."""
    types = foreign.layer_types
    return {"layer_types": types, "sliding_window": foreign.sliding_window if "sliding_attention" in types else None}


def layers_and_window(config: AnyformerConfig) -> dict[str, Any]:
    """The foreign fields of `window`."""
    return {"layer_types": config.layer_types, "sliding_window": config.sliding_window}


FAMILY = Family(
    model_type="llama",
    heads=heads("Llama"),
    head_prefixes={"question_answering": "transformer."},
    config_fields=CONFIG_FIELDS
    | {"attention_bias": "attention_bias", "attention_out_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    fixed=FIXED,
    foreign_fixed={"pretraining_tp": 1},
    weights=WEIGHTS,
    ignored_weights=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",),
    examples=(
        # Weights milder than the usual 0.3: with those rounding alone comes near the tolerance.
        {"initializer_range": 0.25},
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "initializer_range": 0.25},
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "head_dim": 16, "initializer_range": 0.25},
    ),
)
