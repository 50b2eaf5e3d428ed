"""Objectives on a frozen model: medusa, eagle, mtp train what drafts its next tokens for it."""

from typing import Annotated, Literal

from pydantic import Field

from ..fields import Kind
from .base import NO_EFFECT, PLAIN_REFUSED, TRAINING_ARGUMENTS, ObjectiveSection

_COUNT = Field(ge=1)


class DraftObjective(ObjectiveSection):
    """What the three have in common.

    Attributes:
        num_draft_tokens: tokens that are drafted in a pass.
        answers: "base": learned is what the model itself writes, the likeliest token each time, to the prompts of the
            rows; "data": the rows as they stand.
        max_new_tokens: of what the model writes.
        prompts_per_text: of a row of plain text so many pieces, evenly spread, are prompts.
        max_length: longest prompt in tokens, also of a piece of text; with answers: data the longest row.
    """

    num_draft_tokens: Annotated[int, _COUNT] = 3
    answers: Literal["base", "data"] = "base"
    max_new_tokens: Annotated[int, _COUNT] = 64
    prompts_per_text: Annotated[int, _COUNT] = 1
    max_length: Annotated[int, Field(ge=2)] = 64


class MedusaObjective(DraftObjective):
    """`objective: {kind: medusa}`: a head for each place ahead, on the model's last states."""

    kind: Literal["medusa"] = "medusa"


class EagleObjective(DraftObjective):
    """`objective: {kind: eagle}`: a layer that goes on with the model's last states, token by token."""

    kind: Literal["eagle"] = "eagle"


class MtpObjective(DraftObjective):
    """`objective: {kind: mtp}`: a module of a layer for each place ahead, one behind the other."""

    kind: Literal["mtp"] = "mtp"


_SECTIONS: dict[str, type[DraftObjective]] = {"medusa": MedusaObjective, "eagle": EagleObjective, "mtp": MtpObjective}
_RECOMPUTED = "has no effect: the base keeps no activations, and what is trained is small; remove it"
_REFUSED = PLAIN_REFUSED | {
    **dict.fromkeys(
        (f"{name}{end}" for name in ("activation_checkpointing", "gradient_checkpointing") for end in ("", "_kwargs")),
        _RECOMPUTED,
    ),
    "neftune_noise_alpha": NO_EFFECT,
}
# All that the section itself names, so that nothing of another objective is needed to know them.
DRAFTS = tuple(_SECTIONS)
KINDS = {
    kind: Kind(
        section,
        TRAINING_ARGUMENTS,
        code="drafting:DraftHeads",
        refused=_REFUSED,
    )
    for kind, section in _SECTIONS.items()
}
