"""Foreign checkpoints in and out: one small file a family."""

from .convert import ImportReport, LogitComparison, compare_logits, from_hf, import_model, to_hf
from .families import FAMILIES
from .family import ConversionError, Family

__all__ = [
    "FAMILIES",
    "ConversionError",
    "Family",
    "ImportReport",
    "LogitComparison",
    "compare_logits",
    "from_hf",
    "import_model",
    "to_hf",
]
