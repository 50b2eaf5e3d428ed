"""Objectives on labels: classify, token-classify."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from ..fields import SHAPES, Kind, Length, wrong
from .base import LIBRARY_REFUSED, TRAINING_ARGUMENTS, ObjectiveSection


def _names(value: list[str]) -> list[str]:
    if not value or not all(name.strip() for name in value):
        raise wrong("is empty or holds an empty name: leave it out to take the labels of the training rows")
    if twice := [name for name in value if value.count(name) > 1]:
        raise wrong(f"names {twice[0]!r} twice")
    return value


Names = Annotated[list[str], AfterValidator(_names)]


class ClassifyObjective(ObjectiveSection):
    """`objective: {kind: classify}`: a class, several labels or a value for each text.

    Attributes:
        problem: what a label is: one class, a list of names, or a number.
        labels: the classes in their order; default: those of the training rows, sorted. Rows may hold their numbers.
        max_length: longest text in tokens, default the model's. `data.truncation` says what becomes of longer ones.
    """

    kind: Literal["classify"] = "classify"
    problem: Literal["single-label", "multi-label", "regression"] = "single-label"
    labels: Names | None = None
    max_length: Length | None = None


class TokenClassifyObjective(ObjectiveSection):
    """`objective: {kind: token-classify}`: a tag for each word.

    Attributes:
        labels, max_length: as of `classify`; words beyond the length are left out.
    """

    kind: Literal["token-classify"] = "token-classify"
    labels: Names | None = None
    max_length: Length | None = None


KINDS = {
    "classify": Kind(
        ClassifyObjective,
        TRAINING_ARGUMENTS,
        code="classify:TextClassification",
        shapes=SHAPES,
        truncation="keep_start",
        unsplit="a label says something of the whole text",
        refused=LIBRARY_REFUSED,
    ),
    "token-classify": Kind(
        TokenClassifyObjective,
        TRAINING_ARGUMENTS,
        code="token_classify:TokenClassification",
        shapes=SHAPES,
        truncation="keep_start",
        unsplit="a tag is told from the words on both sides",
        refused=LIBRARY_REFUSED,
    ),
}
