"""Qwen 3 (Yang et al. 2025, arXiv:2505.09388)."""

from ..family import Family, layers
from .llama import CONFIG_FIELDS, FIXED, WEIGHTS, heads, layers_and_window, window

QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")

FAMILY = Family(
    model_type="qwen3",
    heads=heads("Qwen3"),
    head_prefixes={"question_answering": "transformer."},
    config_fields=CONFIG_FIELDS | {"attention_bias": "attention_bias", "attention_out_bias": "attention_bias"},
    fixed=FIXED | {"qk_norm": "head", "mlp_bias": False},
    read=window,
    write=lambda config: layers_and_window(config) | {"use_sliding_window": config.sliding_window is not None},
    # The window is read where a layer has it; the other two only help the class to fill in the first.
    free_fields=("sliding_window", "use_sliding_window", "max_window_layers"),
    weights=WEIGHTS | layers(QK_NORMS),
    examples=(
        {"head_dim": 16},
        {
            "head_dim": 8,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "initializer_range": 0.25,  # milder than the usual 0.3: rounding comes near the tolerance
        },
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
)
