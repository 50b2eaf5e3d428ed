"""GPT-OSS 20B and 120B (OpenAI 2025, arXiv:2508.10925)."""

from typing import Any

import torch

from ...configuration_anyformer import AnyformerConfig
from ..family import Family, layers
from ..transforms import Tensors, Transform
from .llama import ATTENTION, NORMS, OUTSIDE, heads
from .mixtral import EXPERT_FIELDS, FIXED

LAYER = "model.layers.{layer}."


class TransposedExperts(Transform):
    """[experts, in, out] <-> [experts, out, in]."""

    def to_ours(self, tensors: Tensors, config: Any) -> Tensors:
        return [tensors[0].transpose(1, 2).contiguous()]

    to_theirs = to_ours


class InterleavedExperts(Transform):
    """Gate and up alternate along the outputs, [experts, in, 2 * size] or a bias; ours are the gates, then the ups."""

    def to_ours(self, tensors: Tensors, config: Any) -> Tensors:
        whole = tensors[0].transpose(1, 2) if tensors[0].dim() == 3 else tensors[0]
        return [torch.cat((whole[:, ::2], whole[:, 1::2]), dim=1)]

    def to_theirs(self, tensors: Tensors, config: Any) -> Tensors:
        whole = torch.stack(tensors[0].chunk(2, dim=1), dim=2).flatten(1, 2)
        return [whole.transpose(1, 2).contiguous() if whole.dim() == 3 else whole]


def read(foreign: Any) -> dict[str, Any]:
    sliding = "sliding_attention" in foreign.layer_types
    return {"layer_types": foreign.layer_types, "sliding_window": foreign.sliding_window if sliding else None}


def write(config: AnyformerConfig) -> dict[str, Any]:
    # The class builds a mask of that width even where no layer uses it.
    return {"layer_types": config.layer_types, "sliding_window": config.sliding_window or 128}


FAMILY = Family(
    model_type="gpt_oss",
    heads=heads("GptOss", "causal_lm", "base", "sequence_classification", "token_classification"),
    config_fields={ours: theirs for ours, theirs in EXPERT_FIELDS.items() if ours != "hidden_act"}
    | {
        "num_experts": "num_local_experts",
        "moe_intermediate_size": "intermediate_size",
        "router_aux_loss_coef": "router_aux_loss_coef",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "swiglu_limit": "swiglu_limit",
    },
    fixed={name: value for name, value in FIXED.items() if name != "attention_out_bias"}
    | {
        "attention_sinks": True,
        "mlp": "clamped",
        "hidden_act": "quick_gelu",
        "mlp_bias": True,
        "router_bias": True,
        "norm_topk_prob": True,
    },
    # The factor of quick_gelu. The class computes the activation by itself, whatever its hidden_act says.
    foreign_fixed={"swiglu_alpha": 1.702},
    free_fields=("hidden_act",),
    read=read,
    write=write,
    weights=OUTSIDE
    | {"score.bias": "score.bias"}
    | layers((*ATTENTION, *NORMS, "self_attn.sinks", "mlp.router.weight", "mlp.router.bias"))
    | {
        LAYER + "mlp.experts.gate_up_proj": InterleavedExperts(LAYER + "mlp.experts.gate_up_proj"),
        LAYER + "mlp.experts.gate_up_proj_bias": InterleavedExperts(LAYER + "mlp.experts.gate_up_proj_bias"),
        LAYER + "mlp.experts.down_proj": TransposedExperts(LAYER + "mlp.experts.down_proj"),
        LAYER + "mlp.experts.down_proj_bias": LAYER + "mlp.experts.down_proj_bias",
    },
    examples=(
        {"head_dim": 8, "sliding_window": 7},
        {
            "head_dim": 16,
            "num_key_value_heads": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_bias": False,
            "layer_types": ["full_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "swiglu_limit": 1.5,
            "tie_word_embeddings": True,
        },
    ),
)
