"""ModernBERT (Warner et al. 2024, arXiv:2412.13663)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family
from ..transforms import Split

LAYER = "model.layers.{layer}."
RENAMED = {
    "model.embed_norm": "model.embeddings.norm",
    LAYER + "input_layernorm": LAYER + "attn_norm",
    LAYER + "self_attn.o_proj": LAYER + "attn.Wo",
    LAYER + "post_attention_layernorm": LAYER + "mlp_norm",
    LAYER + "mlp.down_proj": LAYER + "mlp.Wo",
    "model.norm": "model.final_norm",
    "lm_head_transform.dense": "head.dense",
    "lm_head_transform.norm": "head.norm",
    "lm_head": "decoder",
}


def read(foreign: Any) -> dict[str, Any]:
    if foreign.classifier_activation != foreign.hidden_activation:
        raise ValueError(
            f"classifier_activation={foreign.classifier_activation!r} is not hidden_activation="
            f"{foreign.hidden_activation!r}: the head has the activation of the layers"
        )
    sliding = "sliding_attention" in foreign.layer_types
    return {
        "norm": "layernorm" if foreign.norm_bias else "layernorm_nobias",
        "layer_types": foreign.layer_types,
        "sliding_window": foreign.local_attention // 2 if sliding else None,
    }


def write(config: AnyformerConfig) -> dict[str, Any]:
    return {
        "classifier_activation": config.hidden_act,
        "norm_bias": config.norm == "layernorm",
        "layer_types": config.layer_types,
        # It counts both sides.
        "local_attention": 128 if config.sliding_window is None else 2 * config.sliding_window,
    }


FAMILY = Family(
    model_type="modernbert",
    nested_rope=True,
    heads={"masked_lm": "ModernBertForMaskedLM", "base": "ModernBertModel"},
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "rope_parameters": "rope_parameters",
        "norm_eps": "norm_eps",
        "hidden_act": "hidden_activation",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "lm_head_bias": "decoder_bias",
        "head_transform_bias": "classifier_bias",
        "attention_dropout": "attention_dropout",
        "embedding_dropout": "embedding_dropout",
        "activation_dropout": "mlp_dropout",
    },
    fixed={
        "architecture": "encoder",
        "attention": "gqa",
        "position_embedding": "rope",
        "norm_position": "pre",
        "first_norm": False,
        "embedding_norm": True,
        "final_norm": True,
        "mlp": "gated",
        "head_transform": True,
        "hidden_dropout": 0.0,
    },
    read=read,
    write=write,
    free_fields=(
        "cls_token_id",
        "sep_token_id",
        "initializer_cutoff_factor",
        "deterministic_flash_attn",
        # They leave out positions when there are labels.
        "sparse_prediction",
        "sparse_pred_ignore_index",
        # Of heads that are not covered.
        "classifier_pooling",
        "classifier_dropout",
    ),
    weights={"model.embed_tokens.weight": "model.embeddings.tok_embeddings.weight"}
    | {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in RENAMED.items() for kind in ("weight", "bias")}
    | {
        tuple(f"{LAYER}self_attn.{name}_proj.{kind}" for name in "qkv"): Split(f"{LAYER}attn.Wqkv.{kind}", parts=3)
        for kind in ("weight", "bias")
    }
    | {
        tuple(f"{LAYER}mlp.{name}_proj.{kind}" for name in ("gate", "up")): Split(f"{LAYER}mlp.Wi.{kind}")
        for kind in ("weight", "bias")
    },
    examples=(
        {"local_attention": 8, "num_hidden_layers": 4},
        {
            "local_attention": 6,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
            "tie_word_embeddings": False,
            "hidden_activation": "silu",
            "classifier_activation": "silu",
            "norm_eps": 1e-6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {
            "layer_types": ["full_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
)
