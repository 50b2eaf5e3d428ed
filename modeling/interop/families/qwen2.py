"""Qwen 1.5, 2 and 2.5 (Yang et al. 2024, arXiv:2407.10671 and arXiv:2412.15115)."""

from ..family import Family
from .llama import (
    CONFIG_FIELDS,
    FIXED,
    WEIGHTS,
    head_dim_if_needed,
    heads,
    layers_and_window,
    unstated_head_dim,
    window,
    without,
)

FAMILY = Family(
    model_type="qwen2",
    heads=heads("Qwen2"),
    head_prefixes={"question_answering": "transformer."},
    config_fields=without(CONFIG_FIELDS, "head_dim"),
    fixed=FIXED | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    read=lambda foreign: window(foreign) | unstated_head_dim(foreign),
    write=lambda config: (
        layers_and_window(config)
        | head_dim_if_needed(config)
        | {"use_sliding_window": config.sliding_window is not None}
    ),
    # The window is read where a layer has it; the other two only help the class to fill in the first.
    free_fields=("sliding_window", "use_sliding_window", "max_window_layers"),
    weights=WEIGHTS,
    examples=(
        {},
        {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        {
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
