"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108)."""

from ..family import Family
from .bert import CLASSIFIERS, FIXED, KINDS

_OUTSIDE = {
    "model.embed_norm": "distilbert.embeddings.LayerNorm",
    "lm_head_transform.dense": "vocab_transform",
    "lm_head_transform.norm": "vocab_layer_norm",
    "lm_head": "vocab_projector",
}
_LAYER = {
    "self_attn.q_proj": "attention.q_lin",
    "self_attn.k_proj": "attention.k_lin",
    "self_attn.v_proj": "attention.v_lin",
    "self_attn.o_proj": "attention.out_lin",
    "post_attention_layernorm": "sa_layer_norm",
    "mlp.up_proj": "ffn.lin1",
    "mlp.down_proj": "ffn.lin2",
    "post_feedforward_layernorm": "output_layer_norm",
}

FAMILY = Family(
    model_type="distilbert",
    # The sequence classifier has a ReLU layer that ours lacks: not covered.
    heads={
        "masked_lm": "DistilBertForMaskedLM",
        "base": "DistilBertModel",
        "token_classification": "DistilBertForTokenClassification",
        "question_answering": "DistilBertForQuestionAnswering",
    },
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_act": "activation",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "dropout",
        "embedding_dropout": "dropout",
    },
    fixed=FIXED | {"position_offset": 0, "type_vocab_size": 0, "norm_eps": 1e-12},
    # Sinusoidal positions are only where the learned table starts from: it is stored either way.
    free_fields=("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout"),
    weights=CLASSIFIERS
    | {
        "model.embed_tokens.weight": "distilbert.embeddings.word_embeddings.weight",
        "model.positions.weight": "distilbert.embeddings.position_embeddings.weight",
    }
    | {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in _OUTSIDE.items() for kind in KINDS}
    | {
        f"model.layers.{{layer}}.{ours}.{kind}": f"distilbert.transformer.layer.{{layer}}.{theirs}.{kind}"
        for ours, theirs in _LAYER.items()
        for kind in KINDS
    },
    prefix="distilbert.",
    ignored_weights=("distilbert.embeddings.position_ids",),
    # Milder weights than the usual ones: at logits this large fp32 rounding reaches 1e-5.
    examples=(
        {"initializer_range": 0.2},
        {"initializer_range": 0.2, "activation": "relu", "n_heads": 1, "tie_word_embeddings": False},
        {"sinusoidal_pos_embds": True, "n_layers": 1, "dropout": 0.0},
    ),
)
