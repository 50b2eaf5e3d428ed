"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219 and arXiv:2412.08905)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family, layers
from ..transforms import Split, qkv_sizes
from .llama import CONFIG_FIELDS, FIXED, NORMS, OUTSIDE, heads, without

LAYER = "model.layers.{layer}."


def rope_parameters(foreign: Any) -> dict[str, Any]:
    """A stock class that rotates shares of heads writes out a partial_rotary_factor of 1; ours leaves it out."""
    rope = dict(foreign.rope_parameters)
    if rope.get("partial_rotary_factor") == 1.0:
        del rope["partial_rotary_factor"]
    return {"rope_parameters": rope}


def write(config: AnyformerConfig) -> dict[str, Any]:
    rope = config.rope_parameters or {}
    if rope.get("rope_type") not in ("default", "longrope"):
        raise ValueError(f"rope_parameters.rope_type={rope.get('rope_type')!r}: Phi-3 knows 'default' and 'longrope'")
    length = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    return {"rope_parameters": rope, "original_max_position_embeddings": length}


FAMILY = Family(
    model_type="phi3",
    partial_rotary=True,
    heads=heads("Phi3", "causal_lm", "base", "sequence_classification", "token_classification"),
    config_fields=without(CONFIG_FIELDS, "head_dim", "rope_parameters")
    | {"hidden_dropout": "resid_pdrop", "sliding_window": "sliding_window"},
    fixed=without(FIXED, "hidden_dropout") | {"attention_bias": False, "attention_out_bias": False, "mlp_bias": False},
    read=rope_parameters,
    write=write,
    # The stock class has a dropout on the embeddings in its config only; the original length is in longrope's
    # parameters too, and without longrope it means nothing.
    free_fields=("embd_pdrop", "original_max_position_embeddings"),
    weights=OUTSIDE
    | layers(("self_attn.o_proj.weight", "mlp.down_proj.weight", *NORMS))
    | {
        tuple(f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"): Split(
            f"{LAYER}self_attn.qkv_proj.weight", sizes=qkv_sizes
        ),
        (f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"): Split(f"{LAYER}mlp.gate_up_proj.weight"),
    },
    examples=(
        {"original_max_position_embeddings": 64},
        {
            "num_key_value_heads": 4,
            "sliding_window": 6,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        {  # the text is longer than the original length: long factors
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.2, 2.0, 3.5],
            },
        },
        {  # short factors
            # Milder than the usual 0.3: rounding comes near the tolerance.
            "initializer_range": 0.25,
            "original_max_position_embeddings": 48,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 1.5],
                "long_factor": [1.2, 2.0, 3.5, 4.0],
            },
        },
    ),
)
