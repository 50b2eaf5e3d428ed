"""Falcon-7B, 11B, 40B and 180B (Almazrouei et al. 2023, arXiv:2311.16867)."""

from typing import Any

from ..family import Family
from .gpt2 import HEAD_WEIGHTS, LAYER, TOKEN_CLASSIFIER, renamed
from .gpt_neox import fused_layer
from .llama import heads

BLOCK = "transformer.h.{layer}."


def _read(foreign: Any) -> dict[str, Any]:
    if foreign.new_decoder_architecture:
        norms = 2 if foreign.num_ln_in_parallel_attn is None else foreign.num_ln_in_parallel_attn
        return {
            "num_key_value_heads": foreign.num_kv_heads,
            "norm_position": "parallel_dual" if norms == 2 else "parallel",
        }
    return {
        "num_key_value_heads": 1 if foreign.multi_query else foreign.num_attention_heads,
        "norm_position": "parallel" if foreign.parallel_attn else "pre",
    }


def _write(config: Any) -> dict[str, Any]:
    kv_heads, position = config.num_key_value_heads, config.norm_position
    old = position != "parallel_dual" and kv_heads in (1, config.num_attention_heads)
    if old:  # Falcon-7B
        return {"multi_query": kv_heads == 1, "parallel_attn": position == "parallel"}
    norms = 2 if position == "parallel_dual" else 1
    return {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": norms}


FAMILY = Family(
    model_type="falcon",
    heads=heads("Falcon"),
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "rope_parameters": "rope_parameters",
        "norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation",
        "attention_bias": "bias",
        "attention_out_bias": "bias",
        "mlp_bias": "bias",
        "hidden_dropout": "hidden_dropout",
    },
    fixed={
        "attention": "gqa",
        "position_embedding": "rope",
        "norm": "layernorm",
        "mlp": "dense",
        "lm_head_bias": False,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    foreign_fixed={
        "alibi": False,  # its slopes are rounded to bfloat16 and its bias is scaled with the scores
        "attention_dropout": 0.0,  # the stock class applies it elsewhere
    },
    read=_read,
    write=_write,
    # All are read; several of their values say the same.
    free_fields=("multi_query", "new_decoder_architecture", "num_kv_heads", "num_ln_in_parallel_attn", "parallel_attn"),
    weights=HEAD_WEIGHTS
    | renamed({"embed_tokens": "word_embeddings", "norm": "ln_f"}, "model.", "transformer.")
    | fused_layer(BLOCK, "self_attention"),
    weights_when=(
        TOKEN_CLASSIFIER,
        (
            {"norm_position": "parallel_dual"},
            renamed({"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}, LAYER, BLOCK),
        ),
    ),
    prefix="transformer.",
    examples=(
        {},  # 7B
        {"new_decoder_architecture": True, "num_kv_heads": 2},  # 40B, 180B
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},  # 11B
        {
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "activation": "relu",
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0},
        },
    ),
)
