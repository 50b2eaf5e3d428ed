"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, arXiv:2306.11644; Li et al. 2023, arXiv:2309.05463)."""

from ..family import Family, layers
from .gpt2 import LAYER, renamed
from .llama import ATTENTION, CONFIG_FIELDS, OUTSIDE, heads

FAMILY = Family(
    model_type="phi",
    partial_rotary=True,
    heads=heads("Phi", "causal_lm", "base", "sequence_classification", "token_classification"),
    config_fields={ours: theirs for ours, theirs in CONFIG_FIELDS.items() if ours != "head_dim"}
    | {"norm_eps": "layer_norm_eps", "hidden_dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop"},
    fixed={
        "attention": "gqa",
        "attention_bias": True,
        "attention_out_bias": True,
        "position_embedding": "rope",
        "norm": "layernorm",
        "norm_position": "parallel",
        "mlp": "dense",
        "mlp_bias": True,
        "lm_head_bias": True,
    },
    read=lambda foreign: {"qk_norm": "head" if foreign.qk_layernorm else "none"},
    write=lambda config: {"qk_layernorm": config.qk_norm == "head"},
    weights=OUTSIDE
    | {name: name for name in ("lm_head.bias", "score.bias")}
    | layers(ATTENTION)
    | renamed({"norm": "final_layernorm"}, "model.", "model.")
    | renamed(
        {
            "self_attn.o_proj": "self_attn.dense",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
            "input_layernorm": "input_layernorm",
        },
        LAYER,
        LAYER,
    ),
    examples=(
        {},
        {
            "num_key_value_heads": 4,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
)
