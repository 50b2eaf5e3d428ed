"""GLM-4-0414 (GLM Team 2024, arXiv:2406.12793)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family, layers
from ..transforms import Split
from .llama import ATTENTION, CONFIG_FIELDS, FIXED, OUTSIDE, heads, without
from .phi3 import rope_parameters

LAYER = "model.layers.{layer}."
# The names of the four norms, in the order in which they are applied: ours, GLM's.
NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def write(config: AnyformerConfig) -> dict[str, Any]:
    """Without a partial_rotary_factor the stock config takes a half."""
    return {"rope_parameters": {"partial_rotary_factor": 1.0} | (config.rope_parameters or {})}


FAMILY = Family(
    model_type="glm4",
    partial_rotary=True,
    heads=heads("Glm4", "causal_lm", "base", "sequence_classification", "token_classification"),
    config_fields=without(CONFIG_FIELDS, "rope_parameters") | {"attention_bias": "attention_bias"},
    fixed=FIXED
    | {
        "norm_position": "sandwich",
        "position_layout": "interleaved",
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    read=rope_parameters,
    write=write,
    weights=OUTSIDE
    | layers((*ATTENTION, "mlp.down_proj.weight"))
    | {f"{LAYER}{ours}.weight": f"{LAYER}{theirs}.weight" for ours, theirs in NORMS.items()}
    | {(f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"): Split(f"{LAYER}mlp.gate_up_proj.weight")},
    examples=(
        # Milder than the usual 0.3: rounding comes near the tolerance.
        {"head_dim": 8, "initializer_range": 0.25},
        {
            "head_dim": 16,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
)
