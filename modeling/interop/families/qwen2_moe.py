"""Qwen1.5-MoE and Qwen2-57B-A14B (Yang et al. 2024, arXiv:2407.10671)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family, layers
from .llama import heads
from .mixtral import CLASSIFIERS, EXPERT_FIELDS, EXPERT_WEIGHTS, FIXED, MILD, YARN

# `head_dim` is no field of these configs, but their classes use it where a checkpoint states it (Qwen3-30B-A3B).
FIELDS = {ours: theirs for ours, theirs in EXPERT_FIELDS.items() if ours != "head_dim"} | {
    "num_experts": "num_experts",
    "moe_intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
    "router_aux_loss_coef": "router_aux_loss_coef",
}


def read_layers(foreign: Any) -> dict[str, Any]:
    """Which layers are sparse: every `decoder_sparse_step`-th that `mlp_only_layers` does not name."""
    step, dense = foreign.decoder_sparse_step, foreign.mlp_only_layers
    types = [
        "dense" if layer in dense or (layer + 1) % step else "sparse" for layer in range(foreign.num_hidden_layers)
    ]
    return {"head_dim": getattr(foreign, "head_dim", None), "mlp_layer_types": types}


def write_layers(config: AnyformerConfig) -> dict[str, Any]:
    dense = [layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "dense"]
    follows = config.head_dim * config.num_attention_heads == config.hidden_size
    return {"mlp_only_layers": dense} | ({} if follows else {"head_dim": config.head_dim})


def read(foreign: Any) -> dict[str, Any]:
    window, types = foreign.sliding_window, foreign.layer_types  # a window of 0 unless use_sliding_window is set
    used = foreign.use_sliding_window and "sliding_attention" in types
    return read_layers(foreign) | {"layer_types": types, "sliding_window": window if used else None}


def write(config: AnyformerConfig) -> dict[str, Any]:
    window = config.sliding_window
    return write_layers(config) | {
        "layer_types": config.layer_types,
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


# Both are read, as `mlp_layer_types`; what comes back names the dense layers in `mlp_only_layers` alone.
LAYER_FIELDS = ("decoder_sparse_step", "mlp_only_layers")

FAMILY = Family(
    model_type="qwen2_moe",
    heads=heads("Qwen2Moe"),
    config_fields=FIELDS
    | {"attention_bias": "qkv_bias", "shared_expert_intermediate_size": "shared_expert_intermediate_size"},
    fixed=FIXED | {"shared_expert_gate": True},
    read=read,
    write=write,
    free_fields=(*LAYER_FIELDS, "max_window_layers"),
    weights=EXPERT_WEIGHTS
    | CLASSIFIERS
    | layers(f"mlp.shared_expert.{projection}_proj.weight" for projection in ("gate", "up", "down"))
    | layers(("mlp.shared_expert_gate.weight",)),
    examples=(
        MILD | {"shared_expert_intermediate_size": 40},
        {
            "initializer_range": 0.1,  # milder still, for four layers
            "shared_expert_intermediate_size": 24,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
        MILD
        | {
            "shared_expert_intermediate_size": 24,
            "num_key_value_heads": 4,
            "qkv_bias": False,
            "norm_topk_prob": True,
            "num_experts_per_tok": 3,
            "rope_parameters": YARN,
        },
    ),
)
