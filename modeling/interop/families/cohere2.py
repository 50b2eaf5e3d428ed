"""Command R7B and Command A (Cohere 2025, arXiv:2504.00698)."""

from typing import Any

from ..family import Family
from .cohere import COHERE_FIELDS, COHERE_FIXED, COHERE_WEIGHTS
from .llama import heads, layers_and_window, window


def read(foreign: Any) -> dict[str, Any]:
    """Layers that see everything are not rotated."""
    rotated = [int(kind == "sliding_attention") for kind in foreign.layer_types]
    return window(foreign) | {"no_rope_layers": None if all(rotated) else rotated}


FAMILY = Family(
    model_type="cohere2",
    heads=heads("Cohere2", "causal_lm", "base"),
    config_fields=COHERE_FIELDS,
    fixed=COHERE_FIXED,
    read=read,
    write=layers_and_window,
    free_fields=("sliding_window",),  # read where a layer has it
    weights=COHERE_WEIGHTS,
    examples=(
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        {
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {"logit_scale": 0.25},  # all layers slide
    ),
)
