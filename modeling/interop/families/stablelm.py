"""StableLM-3B, StableLM 2 and Stable Code (Bellagente et al. 2024, arXiv:2402.17834)."""

from ..family import Family, layers
from .llama import CONFIG_FIELDS, NORMS, WEIGHTS, heads

FAMILY = Family(
    model_type="stablelm",
    partial_rotary=True,
    heads=heads("StableLm", "causal_lm", "base", "sequence_classification", "token_classification"),
    config_fields={ours: theirs for ours, theirs in CONFIG_FIELDS.items() if ours != "head_dim"}
    | {"norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias", "hidden_dropout": "hidden_dropout"},
    fixed={
        "attention": "gqa",
        "attention_out_bias": False,
        "position_embedding": "rope",
        "norm": "layernorm",
        "mlp": "gated",
        "mlp_bias": False,
        "lm_head_bias": False,
        "embedding_dropout": 0.0,
    },
    # The norms of queries and keys (StableLM 2 12B) have no bias, the others have one.
    foreign_fixed={"qk_layernorm": False},
    read=lambda foreign: {"norm_position": "parallel" if foreign.use_parallel_residual else "pre"},
    write=lambda config: {"use_parallel_residual": config.norm_position == "parallel"},
    weights=WEIGHTS
    | {name: name for name in ("model.norm.bias", "score.bias")}
    | layers(name.replace("weight", "bias") for name in NORMS),
    examples=(
        {},
        {"num_key_value_heads": 4, "use_qkv_bias": True, "use_parallel_residual": True, "tie_word_embeddings": True},
    ),
)
