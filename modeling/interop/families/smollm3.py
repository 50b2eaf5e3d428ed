"""SmolLM3 (Hugging Face 2025; layers without rotation: Yang et al. 2025, arXiv:2501.18795)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
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


def read(foreign: Any) -> dict[str, Any]:
    rotated = foreign.no_rope_layers
    values = window(foreign) | unstated_head_dim(foreign) | {"no_rope_layers": None if all(rotated) else rotated}
    return values if foreign.use_sliding_window else values | {"sliding_window": None}


def write(config: AnyformerConfig) -> dict[str, Any]:
    """All layers rotated must be said, for the stock config leaves out every fourth by itself."""
    return (
        layers_and_window(config)
        | head_dim_if_needed(config)
        | {
            "no_rope_layers": config.no_rope_layers or [1] * config.num_hidden_layers,
            "use_sliding_window": config.sliding_window is not None,
        }
    )


FAMILY = Family(
    model_type="smollm3",
    heads=heads("SmolLM3"),
    head_prefixes={"question_answering": "transformer."},
    config_fields=without(CONFIG_FIELDS, "head_dim")
    | {
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    },
    fixed=FIXED,
    read=read,
    write=write,
    # The window and its switch are read where a layer has them; the interval only helps to fill in no_rope_layers.
    free_fields=("sliding_window", "use_sliding_window", "no_rope_layer_interval"),
    weights=WEIGHTS,
    examples=(
        {"no_rope_layers": [1, 0]},
        {
            "no_rope_layer_interval": 2,
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5e6, "factor": 2.0},
        },  # all layers are rotated
    ),
)
