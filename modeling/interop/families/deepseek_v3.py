"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv:2412.19437)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family, layers
from .llama import heads
from .mixtral import EXPERT_FIELDS, EXPERT_WEIGHTS, FIXED, MILD, YARN

LAYER = "model.layers.{layer}."
# Shared with DeepSeek-V2. `head_dim` is that of the rotary part on both sides.
LATENT_FIELDS = EXPERT_FIELDS | {
    name: name
    for name in (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "routed_scaling_factor",
        "attention_bias",
    )
}
LATENT_FIELDS |= {"attention_out_bias": "attention_bias", "num_experts": "n_routed_experts"}
LATENT_FIXED = {name: value for name, value in FIXED.items() if name != "attention_out_bias"} | {
    "attention": "mla",
    "shared_expert_gate": False,
}
LATENT_WEIGHTS = (
    EXPERT_WEIGHTS
    | layers(
        f"self_attn.{name}"
        for name in (
            "q_a_proj.weight",
            "q_a_proj.bias",
            "q_a_layernorm.weight",
            "q_b_proj.weight",
            "kv_a_proj_with_mqa.weight",
            "kv_a_proj_with_mqa.bias",
            "kv_a_layernorm.weight",
            "kv_b_proj.weight",
        )
    )
    | {
        f"{LAYER}mlp.shared_expert.{name}.weight": f"{LAYER}mlp.shared_experts.{name}.weight"
        for name in ("gate_proj", "up_proj", "down_proj")
    }
)


def read_shared(foreign: Any) -> dict[str, Any]:
    if not foreign.n_shared_experts:
        raise ValueError("n_shared_experts must be at least 1: the class always has a shared expert")
    return {"shared_expert_intermediate_size": foreign.n_shared_experts * foreign.moe_intermediate_size}


def write_shared(config: AnyformerConfig) -> dict[str, Any]:
    return {"n_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size}


def read(foreign: Any) -> dict[str, Any]:
    return read_shared(foreign) | {"position_layout": "interleaved" if foreign.rope_interleave else "half"}


def write(config: AnyformerConfig) -> dict[str, Any]:
    return write_shared(config) | {"rope_interleave": config.position_layout == "interleaved"}


TINY = MILD | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}

FAMILY = Family(
    model_type="deepseek_v3",
    heads=heads("DeepseekV3", "causal_lm", "base", "sequence_classification", "token_classification"),
    config_fields=LATENT_FIELDS | {name: name for name in ("norm_topk_prob", "n_group", "topk_group")},
    fixed=LATENT_FIXED | {"router": "sigmoid", "router_score_bias": True, "group_score": "top2"},
    foreign_fixed={"pretraining_tp": 1},
    read=read,
    write=write,
    # Heads that predict further tokens; the class holds none of their weights.
    free_fields=("num_mtp_layers",),
    weights=LATENT_WEIGHTS
    | {
        "score.bias": "score.bias",
        LAYER + "mlp.router.e_score_correction_bias": LAYER + "mlp.gate.e_score_correction_bias",
    },
    examples=(
        TINY | {"q_lora_rank": 20, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        TINY
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        TINY
        | {
            "q_lora_rank": 20,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
        },
    ),
)
