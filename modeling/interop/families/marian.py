"""Marian and the OPUS-MT translation models (Junczys-Dowmunt et al. 2018, arXiv:1804.00344)."""

from typing import Any

from ..family import Family
from . import bart

# The tables are fixed sines and cosines, which both sides compute for themselves.
POSITION_TABLES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
SINUSOIDAL = {"position_embedding": "sinusoidal", "position_layout": "half", "embedding_norm": False}


def _read(foreign: Any) -> dict[str, Any]:
    if foreign.decoder_vocab_size != foreign.vocab_size:
        raise ValueError(
            f"decoder_vocab_size={foreign.decoder_vocab_size}: only vocab_size={foreign.vocab_size} can be imported"
        )
    return bart.read(foreign)


FAMILY = Family(
    model_type="marian",
    heads={"seq2seq_lm": "MarianMTModel", "base": "MarianModel"},
    config_fields=bart.CONFIG_FIELDS,
    fixed=bart.FIXED | SINUSOIDAL | {"norm_position": "post"},
    foreign_fixed=bart.FOREIGN_FIXED | {"share_encoder_decoder_embeddings": True},
    read=_read,
    write=lambda config: bart.write(config) | {"decoder_vocab_size": config.vocab_size},
    free_fields=bart.FREE_FIELDS,
    weights=bart.weights(bart.POST_NORMS, {}),
    tied=bart.TIED,
    ignored_weights=POSITION_TABLES,
    recomputed=POSITION_TABLES,
    examples=(
        bart.EXAMPLE | {"scale_embedding": True, "activation_function": "swish"},
        bart.EXAMPLE | {"decoder_layers": 1, "activation_function": "relu", "dropout": 0.0},
    ),
)
