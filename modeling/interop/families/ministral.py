"""Ministral 8B: Mistral with a window in some layers only (Mistral AI 2024; Jiang et al. 2023, arXiv:2310.06825)."""

from ..family import Family
from .llama import CONFIG_FIELDS, FIXED, WEIGHTS, heads, layers_and_window, window

FAMILY = Family(
    model_type="ministral",
    heads=heads("Ministral"),
    head_prefixes={"question_answering": "transformer."},
    config_fields=CONFIG_FIELDS,
    fixed=FIXED | {"attention_bias": False, "attention_out_bias": False, "mlp_bias": False},
    read=window,
    write=layers_and_window,
    free_fields=("sliding_window",),  # read where a layer has it
    weights=WEIGHTS,
    examples=(
        {"head_dim": 8, "sliding_window": 6},
        {
            "head_dim": 16,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
        # Weights milder than the usual 0.3: with those rounding comes near the tolerance.
        {"head_dim": 8, "layer_types": ["full_attention"] * 2, "initializer_range": 0.25},
    ),
)
