"""BERT and what keeps its layout, as MiniLM and the BGE and E5 encoders (Devlin et al. 2018, arXiv:1810.04805)."""

from typing import Any

from ..family import Family

# Shared with RoBERTa.
CONFIG_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "type_vocab_size": "type_vocab_size",
    "norm_eps": "layer_norm_eps",
    "hidden_act": "hidden_act",
    "attention_dropout": "attention_probs_dropout_prob",
    "hidden_dropout": "hidden_dropout_prob",
    "embedding_dropout": "hidden_dropout_prob",
    "classifier_dropout": "classifier_dropout",
}
FIXED = {
    "architecture": "encoder",
    "attention": "gqa",
    "attention_bias": True,
    "attention_out_bias": True,
    "position_embedding": "learned",
    "norm": "layernorm",
    "norm_position": "post",
    "embedding_norm": True,
    "mlp": "dense",
    "mlp_bias": True,
    "lm_head_bias": True,
    "head_transform": True,
    "head_transform_bias": True,
    "activation_dropout": 0.0,
}
# These turn the encoder into a decoder.
FOREIGN_FIXED = {"is_decoder": False, "add_cross_attention": False}
KINDS = ("weight", "bias")
CLASSIFIERS = {
    f"{ours}.{kind}": f"{theirs}.{kind}"
    for ours, theirs in (("score", "classifier"), ("qa_outputs", "qa_outputs"))
    for kind in KINDS
}


def body(prefix: str) -> dict[Any, Any]:
    """Weights of the model without its heads, in BERT's layout."""
    layer = {
        "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key",
        "self_attn.v_proj": "attention.self.value",
        "self_attn.o_proj": "attention.output.dense",
        "post_attention_layernorm": "attention.output.LayerNorm",
        "mlp.up_proj": "intermediate.dense",
        "mlp.down_proj": "output.dense",
        "post_feedforward_layernorm": "output.LayerNorm",
    }
    table = {
        "model.embed_tokens.weight": prefix + "embeddings.word_embeddings.weight",
        "model.positions.weight": prefix + "embeddings.position_embeddings.weight",
        "model.token_type_embeddings.weight": prefix + "embeddings.token_type_embeddings.weight",
    }
    for kind in KINDS:
        table[f"model.embed_norm.{kind}"] = f"{prefix}embeddings.LayerNorm.{kind}"
        table[f"model.pooler.dense.{kind}"] = f"{prefix}pooler.dense.{kind}"
        for ours, theirs in layer.items():
            table |= {f"model.layers.{{layer}}.{ours}.{kind}": f"{prefix}encoder.layer.{{layer}}.{theirs}.{kind}"}
    return table


FAMILY = Family(
    model_type="bert",
    heads={
        "masked_lm": "BertForMaskedLM",
        "pretraining": "BertForPreTraining",
        "base": "BertModel",
        "sequence_classification": "BertForSequenceClassification",
        "token_classification": "BertForTokenClassification",
        "question_answering": "BertForQuestionAnswering",
    },
    config_fields=CONFIG_FIELDS | {"max_position_embeddings": "max_position_embeddings"},
    fixed=FIXED | {"position_offset": 0},
    foreign_fixed=FOREIGN_FIXED,
    weights=body("bert.")
    | CLASSIFIERS
    | {
        f"{ours}.{kind}": f"cls.{theirs}.{kind}"
        for ours, theirs in (
            ("lm_head_transform.dense", "predictions.transform.dense"),
            ("lm_head_transform.norm", "predictions.transform.LayerNorm"),
            ("lm_head", "predictions.decoder"),
            ("nsp_head", "seq_relationship"),
        )
        for kind in KINDS
    },
    # The class adds the decoder's bias; files hold one of the two or both.
    tied={"cls.predictions.bias": "cls.predictions.decoder.bias"},
    pooler_heads=("base", "pretraining", "sequence_classification"),
    prefix="bert.",
    ignored_weights=("bert.embeddings.position_ids",),
    examples=(
        # Milder than the usual 0.3: rounding comes near the tolerance.
        {"initializer_range": 0.2},
        {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-5, "num_attention_heads": 1},
        {"hidden_act": "gelu_new", "num_hidden_layers": 3, "classifier_dropout": 0.2, "hidden_dropout_prob": 0.0},
    ),
)
