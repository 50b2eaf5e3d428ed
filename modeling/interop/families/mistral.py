"""Mistral 7B, Nemo and Small (Jiang et al. 2023, arXiv:2310.06825)."""

from ..family import Family
from .llama import CONFIG_FIELDS, FIXED, WEIGHTS, heads

FAMILY = Family(
    model_type="mistral",
    heads=heads("Mistral"),
    config_fields=CONFIG_FIELDS | {"sliding_window": "sliding_window"},  # of every layer, where there is one
    fixed=FIXED | {"attention_bias": False, "attention_out_bias": False, "mlp_bias": False},
    weights=WEIGHTS,
    examples=(
        {"initializer_range": 0.25},  # milder than the usual 0.3: rounding comes near the tolerance
        {"sliding_window": 6, "num_key_value_heads": 4, "tie_word_embeddings": True},
        {
            "sliding_window": None,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
)
