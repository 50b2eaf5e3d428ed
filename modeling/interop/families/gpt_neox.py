"""GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373)."""

from typing import Any

from ..family import Family
from ..transforms import GroupedQKV
from .gpt2 import HEAD_WEIGHTS, KINDS, LAYER, QKV, TOKEN_CLASSIFIER, renamed
from .llama import heads


def fused_layer(block: str, attention: str) -> dict[Any, Any]:
    """Table of a layer with the names of Megatron, whose queries, keys and values are one weight."""
    modules = {
        "self_attn.o_proj": f"{attention}.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }
    fused = {QKV[kind]: GroupedQKV(f"{block}{attention}.query_key_value.{kind}") for kind in KINDS}
    return renamed(modules, LAYER, block) | fused


FAMILY = Family(
    model_type="gpt_neox",
    partial_rotary=True,
    heads=heads("GPTNeoX"),
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "rope_parameters": "rope_parameters",
        "norm_eps": "layer_norm_eps",
        "hidden_act": "hidden_act",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "embedding_dropout": "hidden_dropout",
    },
    fixed={
        "attention": "gqa",
        "position_embedding": "rope",
        "norm": "layernorm",
        "mlp": "dense",
        "mlp_bias": True,
        "lm_head_bias": False,
    },
    read=lambda foreign: {
        "norm_position": "parallel_dual" if foreign.use_parallel_residual else "pre",
        "classifier_dropout": foreign.classifier_dropout,
    },
    write=lambda config: (
        {"use_parallel_residual": config.norm_position == "parallel_dual"}
        | ({} if config.classifier_dropout is None else {"classifier_dropout": config.classifier_dropout})
    ),
    free_fields=("is_decoder",),
    weights=HEAD_WEIGHTS
    | {("lm_head.weight",): "embed_out.weight"}  # its name in files; a second rule, read on import alone
    | renamed({"embed_tokens": "embed_in", "norm": "final_layer_norm"}, "model.", "gpt_neox.")
    | fused_layer("gpt_neox.layers.{layer}.", "attention"),
    weights_when=(TOKEN_CLASSIFIER,),
    prefix="gpt_neox.",
    ignored_weights=tuple(
        f"gpt_neox.layers.{{layer}}.attention.{buffer}" for buffer in ("bias", "masked_bias", "rotary_emb.inv_freq")
    ),
    examples=(
        {},
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 500.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
)
