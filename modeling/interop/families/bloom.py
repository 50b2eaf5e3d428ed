"""BLOOM and BLOOMZ (Scao et al. 2022, arXiv:2211.05100)."""

from ..family import Family
from .gpt2 import HEAD_WEIGHTS, TOKEN_CLASSIFIER, renamed
from .gpt_neox import fused_layer
from .llama import heads

FAMILY = Family(
    model_type="bloom",
    heads=heads("Bloom"),
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "norm_eps": "layer_norm_epsilon",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    },
    fixed={
        "attention": "gqa",
        "attention_bias": True,
        "attention_out_bias": True,
        "position_embedding": "alibi",
        "embedding_norm": True,
        "norm": "layernorm",
        "norm_position": "pre",
        "mlp": "dense",
        "mlp_bias": True,
        "hidden_act": "gelu_fast",
        "lm_head_bias": False,
        "embedding_dropout": 0.0,
    },
    foreign_fixed={
        "apply_residual_connection_post_layernorm": False,
        "slow_but_exact": False,  # the stock class would leave out biases
    },
    free_fields=("pretraining_tp",),  # read by slow_but_exact alone
    weights=HEAD_WEIGHTS
    | renamed(
        {"embed_tokens": "word_embeddings", "embed_norm": "word_embeddings_layernorm", "norm": "ln_f"},
        "model.",
        "transformer.",
    )
    | fused_layer("transformer.h.{layer}.", "self_attention"),
    weights_when=(TOKEN_CLASSIFIER,),
    prefix="transformer.",
    # Six heads: ALiBi has other slopes where the number is no power of two.
    examples=({}, {"n_head": 6, "hidden_size": 48, "tie_word_embeddings": False}),
)
