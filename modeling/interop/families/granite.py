"""Granite 3 (Granite Team 2024; its factors: Yang et al. 2022, arXiv:2203.03466)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family
from .llama import CONFIG_FIELDS, FIXED, WEIGHTS, head_dim_if_needed, heads, unstated_head_dim, without


def read(foreign: Any) -> dict[str, Any]:
    multiplier, stated = foreign.attention_multiplier, unstated_head_dim(foreign)
    head_dim = stated["head_dim"] or foreign.hidden_size // foreign.num_attention_heads
    return stated | {
        "attention_multiplier": None if multiplier == head_dim**-0.5 else multiplier,
        "logit_scale": 1.0 / foreign.logits_scaling,
    }


def write(config: AnyformerConfig) -> dict[str, Any]:
    multiplier = config.attention_multiplier
    return head_dim_if_needed(config) | {
        "attention_multiplier": config.head_dim**-0.5 if multiplier is None else multiplier,
        "logits_scaling": inverse(config.logit_scale),
    }


def inverse(scale: float) -> float:
    """The shortest decimal whose inverse is `scale`: the divisor that was read, not a neighbour of it."""
    for digits in range(1, 18):
        divisor = float(f"{1.0 / scale:.{digits}g}")
        if 1.0 / divisor == scale:
            return divisor
    return 1.0 / scale


FAMILY = Family(
    model_type="granite",
    heads=heads("Granite", "causal_lm", "base"),
    config_fields=without(CONFIG_FIELDS, "head_dim")
    | {
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
    },
    fixed=FIXED,
    read=read,
    write=write,
    weights=WEIGHTS,
    examples=(
        # The usual factor and mild weights: with the default factor of 1 rounding alone reaches the tolerance.
        {"attention_multiplier": 8**-0.5, "initializer_range": 0.25},
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.22,
            "logits_scaling": 13.0,
        },
    ),
)
