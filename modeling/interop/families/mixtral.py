"""Mixtral 8x7B and 8x22B (Jiang et al. 2024, arXiv:2401.04088)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family, layers
from .llama import CONFIG_FIELDS, WEIGHTS, heads
from .llama import FAMILY as LLAMA

# What sparse decoders share; the files of the others start from these.
EXPERT_FIELDS = CONFIG_FIELDS | {
    "num_experts_per_tok": "num_experts_per_tok",
    "output_router_logits": "output_router_logits",
}
FIXED = dict(LLAMA.fixed) | {"attention_out_bias": False, "mlp_bias": False, "router": "softmax", "router_bias": False}
ROUTER = {"model.layers.{layer}.mlp.router.weight": "model.layers.{layer}.mlp.gate.weight"}
EXPERTS = layers(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
EXPERT_WEIGHTS = WEIGHTS | ROUTER | EXPERTS
# Token classifiers have a bias, sequence classifiers none.
CLASSIFIERS = {name: name for name in ("score.bias", "qa_outputs.weight", "qa_outputs.bias")}
# For the examples. With larger weights fp32 rounding alone passes 1e-5 in some; in fp64 all agree to 1e-13.
MILD = {"initializer_range": 0.2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def write(config: AnyformerConfig) -> dict[str, Any]:
    """Checkpoints leave `head_dim` out where it follows from the other sizes; some rotary scalings need it stated."""
    follows = config.head_dim * config.num_attention_heads == config.hidden_size
    plain = (config.rope_parameters or {}).get("rope_type") == "default"
    return {"head_dim": None if follows and plain else config.head_dim}


FAMILY = Family(
    model_type="mixtral",
    heads=heads("Mixtral"),
    config_fields=EXPERT_FIELDS
    | {
        "sliding_window": "sliding_window",
        "num_experts": "num_local_experts",
        "moe_intermediate_size": "intermediate_size",
        "router_aux_loss_coef": "router_aux_loss_coef",
    },
    fixed=FIXED | {"attention_bias": False, "norm_topk_prob": True},
    write=write,
    # Noise while training; `head_dim` is read, and comes back as None where that means the same.
    free_fields=("router_jitter_noise", "head_dim"),
    weights=EXPERT_WEIGHTS | CLASSIFIERS,
    examples=(
        {},
        {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": 7, "tie_word_embeddings": True},
        {
            # Milder than the usual 0.3: rounding comes near the tolerance.
            "initializer_range": 0.25,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "router_aux_loss_coef": 0.02,
        },
    ),
)
