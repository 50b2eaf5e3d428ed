"""Qwen3 30B-A3B and 235B-A22B (Yang et al. 2025, arXiv:2505.09388)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family, layers
from .llama import heads
from .mixtral import CLASSIFIERS, EXPERT_WEIGHTS, FIXED, MILD, YARN
from .qwen2_moe import FIELDS, LAYER_FIELDS, read_layers, write_layers


def read(foreign: Any) -> dict[str, Any]:
    window = foreign.sliding_window
    return read_layers(foreign) | {"sliding_window": window if foreign.use_sliding_window else None}


def write(config: AnyformerConfig) -> dict[str, Any]:
    window = config.sliding_window
    return write_layers(config) | {"use_sliding_window": window is not None, "sliding_window": window}


FAMILY = Family(
    model_type="qwen3_moe",
    heads=heads("Qwen3Moe"),
    head_prefixes={"question_answering": "transformer."},
    config_fields=FIELDS | {"attention_bias": "attention_bias", "attention_out_bias": "attention_bias"},
    fixed={name: value for name, value in FIXED.items() if name != "attention_out_bias"} | {"qk_norm": "head"},
    read=read,
    write=write,
    free_fields=LAYER_FIELDS,
    weights=EXPERT_WEIGHTS | CLASSIFIERS | layers(("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
    examples=(
        MILD,
        {"head_dim": 16, "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True},
        {
            # Milder than the usual 0.3: rounding comes near the tolerance.
            "initializer_range": 0.25,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 7,
            "num_key_value_heads": 4,
            "rope_parameters": YARN,
        },
    ),
)
