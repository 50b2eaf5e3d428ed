"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173)."""

from ..family import Family, layers
from .gpt2 import LAYER, renamed
from .llama import ATTENTION, CONFIG_FIELDS, NORMS, OUTSIDE, heads

FAMILY = Family(
    model_type="starcoder2",
    heads=heads("Starcoder2", "causal_lm", "base", "sequence_classification", "token_classification"),
    config_fields={ours: theirs for ours, theirs in CONFIG_FIELDS.items() if ours != "head_dim"}
    | {
        "norm_eps": "norm_epsilon",
        "sliding_window": "sliding_window",
        "attention_bias": "use_bias",
        "attention_out_bias": "use_bias",
        "mlp_bias": "use_bias",
        "hidden_dropout": "residual_dropout",
        "embedding_dropout": "embedding_dropout",
    },
    fixed={
        "attention": "gqa",
        "position_embedding": "rope",
        "norm": "layernorm",
        "norm_position": "pre",
        "mlp": "dense",
        "lm_head_bias": False,
    },
    weights=OUTSIDE
    | {name: name for name in ("model.norm.bias", "score.bias")}
    | layers((*ATTENTION, *NORMS, *(name.replace("weight", "bias") for name in NORMS)))
    | renamed({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}, LAYER, LAYER),
    examples=(
        {"sliding_window": 7},
        {"num_key_value_heads": 4, "use_bias": False, "tie_word_embeddings": False},
    ),
)
