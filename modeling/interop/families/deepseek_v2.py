"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, arXiv:2405.04434)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family
from .deepseek_v3 import LATENT_FIELDS, LATENT_FIXED, LATENT_WEIGHTS, TINY, read_shared, write_shared
from .llama import heads
from .mixtral import YARN

GROUPED = "group_limited_greedy"


def read(foreign: Any) -> dict[str, Any]:
    groups, best = foreign.n_group, foreign.topk_group
    if foreign.topk_method != GROUPED:
        groups = best = 1
    return read_shared(foreign) | {"n_group": groups, "topk_group": best}


def write(config: AnyformerConfig) -> dict[str, Any]:
    groups = {"n_group": config.n_group, "topk_group": config.topk_group}
    return write_shared(config) | groups | {"topk_method": GROUPED if config.n_group > 1 else "greedy"}


FAMILY = Family(
    model_type="deepseek_v2",
    heads=heads("DeepseekV2", "causal_lm", "base", "sequence_classification"),
    config_fields=LATENT_FIELDS,
    fixed=LATENT_FIXED | {"norm_topk_prob": False, "group_score": "max", "position_layout": "interleaved"},
    # The class ignores norm_topk_prob, which the published code reads; its mlp_bias leaves the experts out.
    foreign_fixed={"norm_topk_prob": False, "mlp_bias": False, "pretraining_tp": 1},
    read=read,
    write=write,
    # Both are read where topk_method is the grouped one; else they say nothing, and come back as 1.
    free_fields=("n_group", "topk_group"),
    weights=LATENT_WEIGHTS,
    examples=(
        TINY | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
        TINY
        | {
            "q_lora_rank": 20,
            "n_routed_experts": 8,
            "topk_method": GROUPED,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        TINY
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
)
