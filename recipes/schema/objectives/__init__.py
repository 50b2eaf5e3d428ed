"""Section `objective`: one file for each group of kinds, with the keys and the trainer's config of each."""

from ..fields import Kind
from . import drafting, labels, language, policies, preferences, tuning
from .base import ObjectiveSection
from .drafting import DRAFTS
from .preferences import DPO_LOSSES
from .tuning import WHOLE_SOURCE, SftObjective

OBJECTIVES: dict[str, Kind] = (
    tuning.KINDS | preferences.KINDS | policies.KINDS | language.KINDS | labels.KINDS | drafting.KINDS
)

__all__ = ["DPO_LOSSES", "DRAFTS", "OBJECTIVES", "WHOLE_SOURCE", "ObjectiveSection", "SftObjective"]
