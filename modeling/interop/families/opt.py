"""OPT and Galactica (Zhang et al. 2022, arXiv:2205.01068; Taylor et al. 2022, arXiv:2211.09085)."""

from typing import Any

from ..family import Family
from .gpt2 import HEAD_WEIGHTS, LAYER, renamed
from .llama import heads

BLOCK = "model.decoder.layers.{layer}."


def _read(foreign: Any) -> dict[str, Any]:
    if foreign.word_embed_proj_dim != foreign.hidden_size:
        raise ValueError(
            f"word_embed_proj_dim={foreign.word_embed_proj_dim} differs from hidden_size={foreign.hidden_size} (as in "
            "OPT-350M): embeddings here are as wide as the layers"
        )
    pre = foreign.do_layer_norm_before
    return {
        "norm_position": "pre" if pre else "post",
        "final_norm": pre and not foreign._remove_final_layer_norm,
        "norm": "layernorm" if foreign.layer_norm_elementwise_affine else "layernorm_plain",
    }


def _write(config: Any) -> dict[str, Any]:
    return {
        "word_embed_proj_dim": config.hidden_size,
        "do_layer_norm_before": config.norm_position == "pre",
        "_remove_final_layer_norm": config.norm_position == "pre" and not config.final_norm,
        "layer_norm_elementwise_affine": config.norm == "layernorm",
    }


FAMILY = Family(
    model_type="opt",
    heads=heads("OPT", "causal_lm", "base", "sequence_classification", "question_answering"),
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_dim",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_act": "activation_function",
        "attention_bias": "enable_bias",
        "attention_out_bias": "enable_bias",
        "mlp_bias": "enable_bias",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "initializer_range": "init_std",
    },
    fixed={
        "attention": "gqa",
        "position_embedding": "learned",
        "position_offset": 2,
        "norm_eps": 1e-5,
        "mlp": "dense",
        "lm_head_bias": False,
        "embedding_dropout": 0.0,
    },
    read=_read,
    write=_write,
    free_fields=("layerdrop",),
    weights=HEAD_WEIGHTS
    | renamed(
        {"embed_tokens": "embed_tokens", "positions": "embed_positions", "norm": "final_layer_norm"},
        "model.",
        "model.decoder.",
    )
    | renamed({f"self_attn.{p}_proj": f"self_attn.{p}_proj" for p in "qkv"}, LAYER, BLOCK)
    | renamed({"self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2"}, LAYER, BLOCK),
    weights_when=(
        (
            {"norm_position": "pre"},
            renamed(
                {"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm"},
                LAYER,
                BLOCK,
            ),
        ),
        (
            {"norm_position": "post"},
            renamed(
                {"post_attention_layernorm": "self_attn_layer_norm", "post_feedforward_layernorm": "final_layer_norm"},
                LAYER,
                BLOCK,
            ),
        ),
    ),
    examples=(
        {"init_std": 0.3},
        {"init_std": 0.3, "do_layer_norm_before": False, "tie_word_embeddings": False},
        {"init_std": 0.3, "enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
        # Smaller weights: without the last norm logits are four times as large, and so is their rounding.
        {"init_std": 0.2, "initializer_range": 0.2, "_remove_final_layer_norm": True},
    ),
)
