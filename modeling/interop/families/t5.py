"""T5, T5 v1.1 and Flan-T5 (Raffel et al. 2019, arXiv:1910.10683)."""

from typing import Any

from ...configuration_anyformer import AnyformerConfig
from ..family import Family

# Older configs state the length as n_positions, which the class does not read; all published ones were trained at 512.
_LENGTH = 512


def _read(foreign: Any) -> dict[str, Any]:
    """v1.0 ties the head and scales what it reads; v1.1 does neither. The stock config keeps only the scaling."""
    scaled = foreign.scale_decoder_outputs
    return {
        "tie_word_embeddings": scaled,
        "logit_scale": foreign.d_model**-0.5 if scaled else 1.0,
        "mlp": "gated" if foreign.feed_forward_proj.startswith("gated-") else "dense",
        "hidden_act": foreign.dense_act_fn,
        "max_position_embeddings": getattr(foreign, "n_positions", _LENGTH),
        "decoder_start_token_id": getattr(foreign, "decoder_start_token_id", None),
    }


def _write(config: AnyformerConfig) -> dict[str, Any]:
    act = "gelu" if config.mlp == "gated" and config.hidden_act == "gelu_new" else config.hidden_act
    values: dict[str, Any] = {"feed_forward_proj": f"gated-{act}" if config.mlp == "gated" else act}
    if config.max_position_embeddings != _LENGTH:
        values["n_positions"] = config.max_position_embeddings
    if config.decoder_start_token_id is not None:
        values["decoder_start_token_id"] = config.decoder_start_token_id
    return values


def _side(ours: str, theirs: str, sublayers: dict[str, str]) -> dict[Any, Any]:
    """Weights of the encoder or the decoder; its sublayers: our (attention, norm before it) by stock name."""
    table = {
        f"{ours}norm.weight": f"{theirs}.final_layer_norm.weight",
        # The first layer's bias serves all of them.
        f"{ours}positions.relative_attention_bias.weight": (
            f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ),
    }
    for name, stock in sublayers.items():
        table[f"{ours}layers.{{layer}}.{name}.weight"] = f"{theirs}.block.{{layer}}.{stock}.weight"
    return table


def _attention(ours: str, norm: str, theirs: str, stock: str) -> dict[str, str]:
    return {f"{ours}.{p}_proj": f"{theirs}.{stock}.{p}" for p in "qkvo"} | {norm: f"{theirs}.layer_norm"}


_SELF = _attention("self_attn", "input_layernorm", "layer.0", "SelfAttention")
_CROSS = _attention("cross_attn", "cross_attention_layernorm", "layer.1", "EncDecAttention")


def _mlp(names: dict[str, str]) -> dict[Any, Any]:
    return _both({f"mlp.{ours}_proj": f"DenseReluDense.{theirs}" for ours, theirs in names.items()})


def _both(names: dict[str, str]) -> dict[Any, Any]:
    """The last sublayer of a layer: the second of the encoder's, the third of the decoder's."""
    sides = (("model.encoder.", "encoder", 1), ("model.", "decoder", 2))
    return {
        f"{ours}layers.{{layer}}.{name}.weight": f"{theirs}.block.{{layer}}.layer.{number}.{stock}.weight"
        for ours, theirs, number in sides
        for name, stock in names.items()
    }


FAMILY = Family(
    model_type="t5",
    # The sequence classifier has a layer that ours lacks, the token classifier is an encoder alone: not covered.
    heads={
        "seq2seq_lm": "T5ForConditionalGeneration",
        "base": "T5Model",
        "question_answering": "T5ForQuestionAnswering",
    },
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_encoder_layers": "num_layers",
        "num_hidden_layers": "num_decoder_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
        "relative_attention_num_buckets": "relative_attention_num_buckets",
        "relative_attention_max_distance": "relative_attention_max_distance",
        "norm_eps": "layer_norm_epsilon",
        "attention_dropout": "dropout_rate",
        "hidden_dropout": "dropout_rate",
        "activation_dropout": "dropout_rate",
        "embedding_dropout": "dropout_rate",
    },
    fixed={
        "architecture": "encoder-decoder",
        "share_embeddings": True,
        "attention": "gqa",
        "attention_bias": False,
        "attention_multiplier": 1.0,
        "position_embedding": "relative",
        "norm": "rmsnorm",
        "norm_position": "pre",
        "mlp_bias": False,
        "lm_head_bias": False,
    },
    foreign_fixed={"is_encoder_decoder": True, "is_decoder": False},
    read=_read,
    write=_write,
    free_fields=("initializer_factor", "classifier_dropout"),
    weights=_side("model.encoder.", "encoder", _SELF)
    | _side("model.", "decoder", _SELF | _CROSS)
    | _both({"post_attention_layernorm": "layer_norm"})
    | {"model.embed_tokens.weight": "shared.weight", "lm_head.weight": "lm_head.weight"}
    | {name: name for name in ("qa_outputs.weight", "qa_outputs.bias")},
    weights_when=(
        ({"mlp": "dense"}, _mlp({"up": "wi", "down": "wo"})),
        ({"mlp": "gated"}, _mlp({"gate": "wi_0", "up": "wi_1", "down": "wo"})),
    ),
    tied={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    prefix="",
    # A leftover of the first checkpoints, which the class has no place for.
    ignored_weights=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    examples=(
        {"d_kv": 8, "decoder_start_token_id": 0},
        {
            "d_kv": 8,
            "decoder_start_token_id": 0,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "initializer_factor": 0.5,  # unscaled logits: at the usual size fp32 rounding reaches 1e-5
        },
        {
            "d_kv": 16,
            "decoder_start_token_id": 0,
            "feed_forward_proj": "gated-silu",
            "num_decoder_layers": 1,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
        },
    ),
)
