"""MPT-7B and MPT-30B (MosaicML 2023, no paper; positions: Press et al. 2021, arXiv:2108.12409)."""

from typing import Any

from ..family import Family
from ..transforms import Split
from .gpt2 import HEAD_WEIGHTS, LAYER, QKV, TOKEN_CLASSIFIER
from .llama import heads

BLOCK = "transformer.blocks.{layer}."
# Of `attn_config`, what the stock class has, whatever its config says.
ATTENTION_FIXED = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
    "attn_pdrop": 0,  # the stock config takes whole numbers alone
}


def _read(foreign: Any) -> dict[str, Any]:
    attention = foreign.attn_config
    for name, value in ATTENTION_FIXED.items():
        if getattr(attention, name) != value:
            raise ValueError(f"attn_config.{name}={getattr(attention, name)!r}: only {value!r} can be imported")
    return {"clip_qkv": attention.clip_qkv or None, "attention_multiplier": attention.softmax_scale}


def _write(config: Any) -> dict[str, Any]:
    scales = {"clip_qkv": config.clip_qkv, "softmax_scale": config.attention_multiplier}
    return {"attn_config": {name: value if value is None else float(value) for name, value in scales.items()}}


FAMILY = Family(
    model_type="mpt",
    heads=heads("Mpt"),
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "norm_eps": "layer_norm_epsilon",
    },
    fixed={
        "attention": "gqa",
        "attention_bias": False,
        "attention_out_bias": False,
        "position_embedding": "alibi",
        "alibi_bias_max": 8,
        "norm": "layernorm_nobias",
        "norm_position": "pre",
        "mlp": "dense",
        "mlp_bias": False,
        "hidden_act": "gelu",
        "lm_head_bias": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "embedding_dropout": 0.0,
    },
    # The stock class computes as if these had these values.
    foreign_fixed={
        "expansion_ratio": 4,
        "logit_scale": None,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
    },
    read=_read,
    write=_write,
    # attn_config is checked in `_read`, all but its kernel; the others nobody reads.
    free_fields=("attn_config", "embedding_fraction", "emb_pdrop", "init_device", "learned_pos_emb", "resid_pdrop"),
    weights=HEAD_WEIGHTS
    | {"model.embed_tokens.weight": "transformer.wte.weight", "model.norm.weight": "transformer.norm_f.weight"}
    | {
        LAYER + "input_layernorm.weight": BLOCK + "norm_1.weight",
        LAYER + "post_attention_layernorm.weight": BLOCK + "norm_2.weight",
        LAYER + "self_attn.o_proj.weight": BLOCK + "attn.out_proj.weight",
        LAYER + "mlp.up_proj.weight": BLOCK + "ffn.up_proj.weight",
        LAYER + "mlp.down_proj.weight": BLOCK + "ffn.down_proj.weight",
        QKV["weight"]: Split(BLOCK + "attn.Wqkv.weight", parts=3),
    },
    weights_when=(TOKEN_CLASSIFIER,),
    prefix="transformer.",
    # The dtype of attn_config is what loading writes there. Six heads: ALiBi has other slopes where the number is no
    # power of two.
    examples=(
        {"attn_config": {"dtype": "float32"}},
        {
            "n_heads": 6,
            "d_model": 48,
            "tie_word_embeddings": False,
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2},
        },
    ),
)
