"""OLMo (Groeneveld et al. 2024, arXiv:2402.00838)."""

from ..family import Family
from .llama import CONFIG_FIELDS, WEIGHTS, heads

FAMILY = Family(
    model_type="olmo",
    heads=heads("Olmo", "causal_lm", "base", "sequence_classification"),
    config_fields={ours: theirs for ours, theirs in CONFIG_FIELDS.items() if ours not in ("head_dim", "norm_eps")}
    | {"attention_bias": "attention_bias", "attention_out_bias": "attention_bias", "clip_qkv": "clip_qkv"},
    fixed={
        "attention": "gqa",
        "position_embedding": "rope",
        "norm": "layernorm_plain",
        "norm_eps": 1e-5,
        "norm_position": "pre",
        "mlp": "gated",
        "mlp_bias": False,
        "lm_head_bias": False,
        "hidden_dropout": 0.0,
        "embedding_dropout": 0.0,
    },
    weights=WEIGHTS,
    examples=(
        {},
        {"num_key_value_heads": 4, "clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True},
    ),
)
