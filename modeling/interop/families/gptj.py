"""GPT-J (Wang and Komatsuzaki 2021, no paper; described by Black et al. 2022, arXiv:2204.06745)."""

from ...validation import rotary_dim
from ..family import Family
from .gpt2 import HEAD_WEIGHTS, LAYER, renamed
from .llama import heads

BLOCK = "transformer.h.{layer}."

FAMILY = Family(
    model_type="gptj",
    partial_rotary=True,
    heads=heads("GPTJ", "causal_lm", "base", "sequence_classification", "question_answering"),
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
        "hidden_dropout": "resid_pdrop",
        "embedding_dropout": "embd_pdrop",
        "attention_dropout": "attn_pdrop",
    },
    fixed={
        "attention": "gqa",
        "attention_bias": False,
        "attention_out_bias": False,
        "position_embedding": "rope",
        "position_layout": "interleaved",
        "norm": "layernorm",
        "norm_position": "parallel",
        "mlp": "dense",
        "mlp_bias": True,
        "lm_head_bias": True,
    },
    read=lambda foreign: {
        "intermediate_size": foreign.n_inner or 4 * foreign.n_embd,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": foreign.rotary_dim / (foreign.n_embd // foreign.n_head),
        },
    },
    write=lambda config: {
        "n_inner": None if config.intermediate_size == 4 * config.hidden_size else config.intermediate_size,
        "rotary_dim": rotary_dim(config, config.rope_parameters),
    },
    free_fields=("n_inner",),  # read, but None and 4 * n_embd say the same
    weights=HEAD_WEIGHTS
    | {"lm_head.bias": "lm_head.bias"}
    | renamed({"embed_tokens": "wte", "norm": "ln_f"}, "model.", "transformer.")
    | renamed(
        {
            "input_layernorm": "ln_1",
            "self_attn.q_proj": "attn.q_proj",
            "self_attn.k_proj": "attn.k_proj",
            "self_attn.v_proj": "attn.v_proj",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "mlp.fc_in",
            "mlp.down_proj": "mlp.fc_out",
        },
        LAYER,
        BLOCK,
    ),
    prefix="transformer.",
    ignored_weights=(BLOCK + "attn.bias", BLOCK + "attn.masked_bias", "transformer.rotary_emb.embed_positions"),
    examples=(
        {"rotary_dim": 4},
        {"rotary_dim": 8, "n_inner": 48, "activation_function": "gelu", "tie_word_embeddings": True},
    ),
)
