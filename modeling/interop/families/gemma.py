"""Gemma and CodeGemma (Gemma Team 2024, arXiv:2403.08295)."""

from typing import Any

from ..family import Family
from .llama import CONFIG_FIELDS, FIXED, WEIGHTS, heads


def embedding_multiplier(foreign: Any) -> dict[str, Any]:
    """Gemma scales its embeddings by a factor that no field states."""
    return {"embedding_multiplier": foreign.hidden_size**0.5}


FAMILY = Family(
    model_type="gemma",
    heads=heads("Gemma", "causal_lm", "base", "sequence_classification", "token_classification"),
    config_fields=CONFIG_FIELDS | {"attention_bias": "attention_bias", "attention_out_bias": "attention_bias"},
    fixed=FIXED | {"norm": "rmsnorm_offset", "mlp_bias": False},
    read=embedding_multiplier,
    # The stock class obeys it in some attention implementations and not in others.
    foreign_fixed={"use_bidirectional_attention": None},
    weights=WEIGHTS,
    examples=(
        {"head_dim": 16, "initializer_range": 0.25},  # milder than the usual 0.3: rounding comes near the tolerance
        {
            "initializer_range": 0.25,
            "head_dim": 8,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
)
