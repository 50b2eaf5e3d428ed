"""Nemotron-4 and Minitron (Parmar et al. 2024, arXiv:2402.16819; Muralidharan et al. 2024, arXiv:2407.14679)."""

from ..family import Family, layers
from .llama import CONFIG_FIELDS, NORMS, WEIGHTS, heads

FAMILY = Family(
    model_type="nemotron",
    partial_rotary=True,
    heads=heads("Nemotron"),
    head_prefixes={"question_answering": "transformer."},
    config_fields=CONFIG_FIELDS
    | {
        "norm_eps": "norm_eps",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    },
    fixed={
        "attention": "gqa",
        "position_embedding": "rope",
        "norm": "layernorm_offset",
        "norm_position": "pre",
        "mlp": "dense",
        "lm_head_bias": False,
        "hidden_dropout": 0.0,
        "embedding_dropout": 0.0,
    },
    weights=WEIGHTS
    | {name: name for name in ("model.norm.bias", "score.bias")}
    | layers(name.replace("weight", "bias") for name in NORMS),
    # Smaller weights than elsewhere: with norms of 1 + w logits are twice as large, and so is their rounding.
    examples=(
        {"initializer_range": 0.15},
        {
            "initializer_range": 0.15,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        },
    ),
)
