"""Command R and Aya (Aryabumi et al. 2024, arXiv:2405.15032)."""

from ..family import Family, layers
from .llama import ATTENTION, CONFIG_FIELDS, FIXED, MLP, OUTSIDE, head_dim_if_needed, heads, unstated_head_dim, without

QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
COHERE_FIELDS = without(CONFIG_FIELDS, "head_dim") | {
    "norm_eps": "layer_norm_eps",
    "attention_bias": "attention_bias",
    "attention_out_bias": "attention_bias",
    "logit_scale": "logit_scale",
}
COHERE_FIXED = FIXED | {
    "norm": "layernorm_nobias",
    "norm_position": "parallel",
    "position_layout": "interleaved",
    "mlp_bias": False,
}
COHERE_WEIGHTS = OUTSIDE | layers((*ATTENTION, *MLP, "input_layernorm.weight"))

FAMILY = Family(
    model_type="cohere",
    heads=heads("Cohere", "causal_lm", "base"),
    config_fields=COHERE_FIELDS,
    fixed=COHERE_FIXED,
    read=lambda foreign: unstated_head_dim(foreign) | {"qk_norm": "separate" if foreign.use_qk_norm else "none"},
    write=lambda config: head_dim_if_needed(config) | {"use_qk_norm": config.qk_norm != "none"},
    weights=COHERE_WEIGHTS | layers(QK_NORMS),
    examples=(
        {},
        {
            "num_key_value_heads": 4,
            "use_qk_norm": True,
            "attention_bias": True,
            "logit_scale": 0.8333333333333334,
            "tie_word_embeddings": False,
        },
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 8e6, "factor": 2.0},
        },
    ),
)
