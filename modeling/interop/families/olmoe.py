"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060)."""

from ..family import Family, layers
from .llama import heads
from .mixtral import EXPERT_FIELDS, EXPERT_WEIGHTS, FIXED

FAMILY = Family(
    model_type="olmoe",
    heads=heads("Olmoe", "causal_lm", "base"),
    config_fields={ours: theirs for ours, theirs in EXPERT_FIELDS.items() if ours != "head_dim"}
    | {
        "num_experts": "num_experts",
        "moe_intermediate_size": "intermediate_size",
        "norm_topk_prob": "norm_topk_prob",
        "router_aux_loss_coef": "router_aux_loss_coef",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "clip_qkv": "clip_qkv",
    },
    fixed={name: value for name, value in FIXED.items() if name != "attention_out_bias"} | {"qk_norm": "full"},
    weights=EXPERT_WEIGHTS | layers(("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
    examples=(
        {},
        {"num_key_value_heads": 4, "attention_bias": True, "clip_qkv": 0.5, "tie_word_embeddings": True},
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
)
