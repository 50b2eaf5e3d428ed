"""Gemma 3 (text) and EmbeddingGemma (Gemma Team 2025, arXiv:2503.19786; Vera et al. 2025, arXiv:2509.20354)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family, layers
from . import gemma2
from .llama import ATTENTION, FIXED, MLP, OUTSIDE

QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def read(foreign: Any) -> dict[str, Any]:
    values = gemma2.read(foreign)
    if not foreign.use_bidirectional_attention:
        return values | {"architecture": "decoder"}
    # The stock window of a bidirectional model leaves out its last distance, ours holds it.
    window = values["sliding_window"] and values["sliding_window"] - 1
    pooling = {"classifier_pooling": "last", "classifier_bias": False}
    return values | pooling | {"architecture": "encoder", "sliding_window": window}


def write(config: AnyformerConfig) -> dict[str, Any]:
    values = gemma2.write(config) | {"use_bidirectional_attention": config.architecture == "encoder"}
    if config.architecture == "encoder" and config.sliding_window:
        values["sliding_window"] = 2 * config.sliding_window  # both sides together: the stock config halves it
    return values


FAMILY = Family(
    model_type="gemma3_text",
    nested_rope=True,
    heads={
        "causal_lm": "Gemma3ForCausalLM",
        "base": "Gemma3TextModel",
        "sequence_classification": "Gemma3TextForSequenceClassification",
    },
    config_fields=gemma2.FIELDS,
    fixed=FIXED | {"norm": "rmsnorm_offset", "norm_position": "sandwich", "qk_norm": "head", "mlp_bias": False},
    read=read,
    write=write,
    free_fields=("sliding_window",),  # read where a layer has it
    foreign_fixed={"attn_logit_softcapping": None},  # the stock class has the field but does not obey it
    weights=OUTSIDE | layers((*ATTENTION, *MLP, *gemma2.SANDWICH_NORMS, *QK_NORMS)),
    examples=(
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "final_logit_softcapping": 5.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},  # all layers slide
    ),
)
