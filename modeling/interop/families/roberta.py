"""RoBERTa (Liu et al. 2019, arXiv:1907.11692)."""

from typing import Any

from ..family import Family
from .bert import CLASSIFIERS, CONFIG_FIELDS, FIXED, FOREIGN_FIXED, KINDS, body


def _read(foreign: Any) -> dict[str, Any]:
    """The first real position has the row after the padding token's; the stock length counts the rows before it."""
    if foreign.pad_token_id is None:
        raise ValueError("pad_token_id is None: positions are counted from it")
    offset = foreign.pad_token_id + 1
    return {"position_offset": offset, "max_position_embeddings": foreign.max_position_embeddings - offset}


FAMILY = Family(
    model_type="roberta",
    heads={
        "masked_lm": "RobertaForMaskedLM",
        "base": "RobertaModel",
        "token_classification": "RobertaForTokenClassification",
        "question_answering": "RobertaForQuestionAnswering",
        "sequence_classification": "RobertaForSequenceClassification",
    },
    config_fields=CONFIG_FIELDS,
    # The masked-LM head is built with gelu whatever hidden_act says.
    fixed=FIXED | {"hidden_act": "gelu"},
    foreign_fixed=FOREIGN_FIXED | {"hidden_act": "gelu"},
    read=_read,
    write=lambda config: {"max_position_embeddings": config.max_position_embeddings + config.position_offset},
    weights=body("roberta.")
    | CLASSIFIERS
    | {
        f"{ours}.{kind}": f"lm_head.{theirs}.{kind}"
        for ours, theirs in (
            ("lm_head_transform.dense", "dense"),
            ("lm_head_transform.norm", "layer_norm"),
            ("lm_head", "decoder"),
        )
        for kind in KINDS
    },
    # The class adds the decoder's bias; files hold one of the two or both.
    tied={"lm_head.bias": "lm_head.decoder.bias"},
    pooler_heads=("base", "sequence_classification"),
    # The sequence classifier's first layer is our pooler under another name.
    head_weights={
        "sequence_classification": {
            f"{ours}.{kind}": f"classifier.{theirs}.{kind}"
            for ours, theirs in (("model.pooler.dense", "dense"), ("score", "out_proj"))
            for kind in KINDS
        }
    },
    first_position=lambda foreign: foreign.pad_token_id + 1,
    prefix="roberta.",
    ignored_weights=("roberta.embeddings.position_ids",),
    examples=(
        # Milder weights than the usual ones: at logits this large fp32 rounding reaches 1e-5.
        {"max_position_embeddings": 64, "initializer_range": 0.2},
        {"max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
)
