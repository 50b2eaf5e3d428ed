"""BART (Lewis et al. 2019, arXiv:1910.13461)."""

import math
from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family
from ..transforms import Reshaped

# Shared with Marian and Pegasus.
CONFIG_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "decoder_ffn_dim",
    "num_encoder_layers": "encoder_layers",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_act": "activation_function",
    "attention_dropout": "attention_dropout",
    "hidden_dropout": "dropout",
    "embedding_dropout": "dropout",
    "activation_dropout": "activation_dropout",
    "initializer_range": "init_std",
    "decoder_start_token_id": "decoder_start_token_id",
}
FIXED = {
    "architecture": "encoder-decoder",
    "share_embeddings": True,
    "tie_word_embeddings": True,
    "attention": "gqa",
    "attention_bias": True,
    "attention_out_bias": True,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "mlp": "dense",
    "mlp_bias": True,
    "lm_head_bias": True,
}
# Untied, the stock class has three embeddings: one of them unused, the others apart.
FOREIGN_FIXED = {"is_encoder_decoder": True, "is_decoder": False, "tie_word_embeddings": True}
FREE_FIELDS = ("encoder_layerdrop", "decoder_layerdrop", "forced_eos_token_id")
TIED = {
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
}
# What the sizes of a tiny model do not set.
EXAMPLE = {"encoder_ffn_dim": 48, "encoder_attention_heads": 4, "init_std": 0.3, "decoder_start_token_id": 2}


def read(foreign: Any) -> dict[str, Any]:
    for size in ("attention_heads", "ffn_dim"):
        encoder, decoder = (getattr(foreign, f"{side}_{size}") for side in ("encoder", "decoder"))
        if encoder != decoder:
            raise ValueError(f"encoder_{size}={encoder}, decoder_{size}={decoder}: only equal ones can be imported")
    return {"embedding_multiplier": math.sqrt(foreign.d_model) if foreign.scale_embedding else 1.0}


def write(config: AnyformerConfig) -> dict[str, Any]:
    return {
        "encoder_attention_heads": config.num_attention_heads,
        "encoder_ffn_dim": config.intermediate_size,
        "scale_embedding": config.embedding_multiplier != 1.0,
    }


def weights(norms: dict[str, str], outside: dict[str, str]) -> dict[Any, Any]:
    """The table of an encoder-decoder in BART's layout.

    Args:
        norms: our norms of a layer by stock name; those of the cross-attention only in the decoder.
        outside: what both sides have beside their layers, by stock name.
    """
    attention = {f"{p}_proj": f"{'out' if p == 'o' else p}_proj" for p in "qkvo"}
    layer = {f"self_attn.{ours}": f"self_attn.{theirs}" for ours, theirs in attention.items()}
    layer |= {"mlp.up_proj": "fc1", "mlp.down_proj": "fc2"} | norms
    cross = {f"cross_attn.{ours}": f"encoder_attn.{theirs}" for ours, theirs in attention.items()}
    cross |= {"cross_attention_layernorm": "encoder_attn_layer_norm"}
    table: dict[str | tuple[str, ...], Any] = {
        "model.embed_tokens.weight": "model.shared.weight",
        "lm_head.weight": "lm_head.weight",
        "lm_head.bias": Reshaped("final_logits_bias", lambda c: (c.vocab_size,), lambda c: (1, c.vocab_size)),
    }
    for ours, theirs, names in (("encoder.", "encoder", layer), ("", "decoder", layer | cross)):
        for kind in ("weight", "bias"):
            for name, stock in names.items():
                table[f"model.{ours}layers.{{layer}}.{name}.{kind}"] = f"model.{theirs}.layers.{{layer}}.{stock}.{kind}"
            for name, stock in outside.items():
                table[f"model.{ours}{name}.{kind}"] = f"model.{theirs}.{stock}.{kind}"
    return table


POST_NORMS = {
    "post_attention_layernorm": "self_attn_layer_norm",
    "post_feedforward_layernorm": "final_layer_norm",
}

FAMILY = Family(
    model_type="bart",
    # The sequence classifier reads the last end token, through a layer that ours lacks: not covered.
    heads={
        "seq2seq_lm": "BartForConditionalGeneration",
        "base": "BartModel",
        "question_answering": "BartForQuestionAnswering",
    },
    config_fields=CONFIG_FIELDS,
    fixed=FIXED
    | {
        "position_embedding": "learned",
        "position_offset": 2,
        "norm_position": "post",
        "embedding_norm": True,
    },
    foreign_fixed=FOREIGN_FIXED,
    read=read,
    write=write,
    free_fields=(*FREE_FIELDS, "classifier_dropout"),
    weights=weights(POST_NORMS, {"embed_norm": "layernorm_embedding"})
    | {
        f"model.{s}positions.weight": f"model.{t}.embed_positions.weight"
        for s, t in (("encoder.", "encoder"), ("", "decoder"))
    }
    | {name: name for name in ("qa_outputs.weight", "qa_outputs.bias")},
    tied=TIED,
    ignored_weights=("model.encoder.version", "model.decoder.version"),
    examples=(
        EXAMPLE,
        EXAMPLE
        | {"scale_embedding": True, "encoder_layers": 1, "activation_function": "relu", "activation_dropout": 0.1},
    ),
)
