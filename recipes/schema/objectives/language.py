"""Objectives on plain text: pretrain, mlm, mlm-nsp."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..fields import Kind
from .base import PLAIN_REFUSED, TRAINING_ARGUMENTS, ObjectiveSection


class PretrainObjective(ObjectiveSection):
    """`objective: {kind: pretrain}`: the next token of plain text; see `plain_text.tokenize_documents`."""

    kind: Literal["pretrain"] = "pretrain"
    max_length: Annotated[int, Field(ge=2)] | None = None
    packing: Literal["blocks", "documents", "none"] = "blocks"


class MlmObjective(ObjectiveSection):
    """`objective: {kind: mlm}`: masked tokens of plain text; the names are those of transformers' collator."""

    kind: Literal["mlm"] = "mlm"
    max_length: Annotated[int, Field(ge=8)] | None = None
    mlm_probability: Annotated[float, Field(ge=0.01, le=1)] = 0.15
    mask_replace_prob: Annotated[float, Field(ge=0, le=1)] = 0.8
    random_replace_prob: Annotated[float, Field(ge=0, le=1)] = 0.1
    whole_word: bool = False

    @model_validator(mode="after")
    def _whole_words_are_all_masked(self) -> "MlmObjective":
        # The collator hides whole words with the mask token alone.
        if self.whole_word:
            self.mask_replace_prob, self.random_replace_prob = 1.0, 0.0
        return self


class MlmNspObjective(MlmObjective):
    """`objective: {kind: mlm-nsp}`: masked tokens, and whether the second of two texts follows the first."""

    kind: Literal["mlm-nsp"] = "mlm-nsp"  # type: ignore[assignment]


_UNREAD = {
    ("data", "truncation"): "has no effect: texts are cut into rows of objective.max_length, and nothing is lost; "
    "remove it"
}
KINDS = {
    "pretrain": Kind(
        PretrainObjective,
        TRAINING_ARGUMENTS,
        code="lm:Pretraining",
        refused=PLAIN_REFUSED,
    ),
    "mlm": Kind(
        MlmObjective,
        TRAINING_ARGUMENTS,
        code="lm:MaskedLanguageModel",
        shapes=("encoder",),
        refused=PLAIN_REFUSED,
        defaults={"remove_unused_columns": False},  # the collator reads columns that the model does not know
        unread=_UNREAD,
    ),
    "mlm-nsp": Kind(
        MlmNspObjective,
        TRAINING_ARGUMENTS,
        code="lm:MaskedAndNextSentence",
        shapes=("encoder",),
        refused=PLAIN_REFUSED,
        defaults={"remove_unused_columns": False},  # the collator reads columns that the model does not know
        unread=_UNREAD,
    ),
}
