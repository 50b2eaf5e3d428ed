"""SmolLM3 (Hugging Face 2025; layers without rotation: Yang et al. 2025, arXiv:2501.18795)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family
from .llama import CONFIG_FIELDS, FIXED, WEIGHTS, heads, without


def read(foreign: Any) -> dict[str, Any]:
    rotated = foreign.no_rope_layers
    return {"no_rope_layers": None if all(rotated) else rotated}


def write(config: AnyformerConfig) -> dict[str, Any]:
    """All layers rotated must be said, for the stock config leaves out every fourth by itself."""
    return {
        "no_rope_layers": config.no_rope_layers or [1] * config.num_hidden_layers,
        "use_sliding_window": config.sliding_window is not None,
    }


FAMILY = Family(
    model_type="smollm3",
    heads=heads("SmolLM3", "causal_lm", "base", "sequence_classification", "token_classification"),
    config_fields=without(CONFIG_FIELDS, "head_dim")
    | {
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "layer_types": "layer_types",
        "sliding_window": "sliding_window",
    },
    fixed=FIXED,
    read=read,
    write=write,
    # A helper of the stock config, which fills in no_rope_layers by it. A use_sliding_window that contradicts the
    # layers is refused: the stock attention implementations do not agree on it.
    free_fields=("no_rope_layer_interval",),
    weights=WEIGHTS,
    examples=(
        {"no_rope_layers": [1, 0]},
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e6, "factor": 2.0}},  # all layers are rotated
    ),
)
