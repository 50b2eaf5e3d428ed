"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family, layers
from .gemma import embedding_multiplier
from .llama import ATTENTION, CONFIG_FIELDS, FIXED, MLP, NORMS, OUTSIDE, heads, layers_and_window, window

SANDWICH_NORMS = (*NORMS, "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
FIELDS = CONFIG_FIELDS | {
    "hidden_act": "hidden_activation",
    "attention_bias": "attention_bias",
    "attention_out_bias": "attention_bias",
    "final_logit_softcapping": "final_logit_softcapping",
}


def read(foreign: Any) -> dict[str, Any]:
    scalar = foreign.query_pre_attn_scalar
    multiplier = None if scalar == foreign.head_dim else scalar**-0.5
    return window(foreign) | embedding_multiplier(foreign) | {"attention_multiplier": multiplier}


def write(config: AnyformerConfig) -> dict[str, Any]:
    """The scalar is a whole number, so that rounding finds it again; where it does not, the round trip says so."""
    multiplier = config.attention_multiplier
    scalar = config.head_dim if multiplier is None else round(multiplier**-2)
    return layers_and_window(config) | {"query_pre_attn_scalar": scalar}


FAMILY = Family(
    model_type="gemma2",
    heads=heads("Gemma2", "causal_lm", "base", "sequence_classification", "token_classification"),
    config_fields=FIELDS | {"attn_logit_softcapping": "attn_logit_softcapping"},
    fixed=FIXED | {"norm": "rmsnorm_offset", "norm_position": "sandwich", "mlp_bias": False},
    read=read,
    write=write,
    free_fields=("sliding_window",),  # read where a layer has it
    # The stock class obeys it in some attention implementations and not in others.
    foreign_fixed={"use_bidirectional_attention": None},
    weights=OUTSIDE | layers((*ATTENTION, *MLP, *SANDWICH_NORMS)),
    examples=(
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6},
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
)
