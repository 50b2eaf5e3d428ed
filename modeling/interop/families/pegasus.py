"""PEGASUS (Zhang et al. 2019, arXiv:1912.08777)."""

from ..family import Family
from . import bart
from .marian import POSITION_TABLES, SINUSOIDAL

_PRE_NORMS = {"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm"}

FAMILY = Family(
    model_type="pegasus",
    heads={"seq2seq_lm": "PegasusForConditionalGeneration", "base": "PegasusModel"},
    config_fields=bart.CONFIG_FIELDS,
    fixed=bart.FIXED | SINUSOIDAL | {"norm_position": "pre"},
    foreign_fixed=bart.FOREIGN_FIXED,
    read=bart.read,
    write=bart.write,
    free_fields=bart.FREE_FIELDS,
    weights=bart.weights(_PRE_NORMS, {"norm": "layer_norm"}),
    tied=bart.TIED,
    ignored_weights=POSITION_TABLES,
    recomputed=POSITION_TABLES,
    examples=(
        bart.EXAMPLE | {"scale_embedding": True, "activation_function": "relu"},
        bart.EXAMPLE | {"encoder_layers": 3, "attention_dropout": 0.1},
    ),
)
