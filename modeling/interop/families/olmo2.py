"""OLMo 2 (OLMo Team 2025, arXiv:2501.00656)."""

from ..family import Family, layers
from .llama import ATTENTION, CONFIG_FIELDS, FIXED, MLP, OUTSIDE, head_dim_if_needed, heads, unstated_head_dim, without

BRANCH_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")

FAMILY = Family(
    model_type="olmo2",
    heads=heads("Olmo2", "causal_lm", "base", "sequence_classification"),
    config_fields=without(CONFIG_FIELDS, "head_dim")
    | {"attention_bias": "attention_bias", "attention_out_bias": "attention_bias"},
    fixed=FIXED | {"norm_position": "branch", "qk_norm": "full", "mlp_bias": False},
    read=unstated_head_dim,
    write=head_dim_if_needed,
    weights=OUTSIDE | layers((*ATTENTION, *MLP, *BRANCH_NORMS, *QK_NORMS)),
    examples=(
        {},
        {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
)
