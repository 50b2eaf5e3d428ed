"""What a recipe may say: one pydantic model a section, strict at every depth.

The sections `train` and `adapter` hold the argument names of the library classes that take them; those are read
from the libraries' source (see `introspection`), so that a new release's fields are known without a change here.
A new kind of adapter is one entry in `ADAPTERS`, a new kind of objective one in a file of `objectives/`.
"""

from .adapters import ADAPTERS, LoraAdapter, NoAdapter
from .fields import SHAPES
from .library import ARCHITECTURE_REFUSED, LIMITS, LOG_LEVELS, architecture_model
from .objectives import DPO_LOSSES, DRAFTS, OBJECTIVES, WHOLE_SOURCE
from .recipe import DEFAULT_KIND, KINDS, SECTIONS, Recipe, kind_in, refused_keys, section_model
from .sections import ModelSection, Quantization
from .sources import DATA_FIELDS

__all__ = [
    "ADAPTERS",
    "ARCHITECTURE_REFUSED",
    "DATA_FIELDS",
    "DEFAULT_KIND",
    "DPO_LOSSES",
    "DRAFTS",
    "KINDS",
    "LIMITS",
    "LOG_LEVELS",
    "OBJECTIVES",
    "SECTIONS",
    "SHAPES",
    "WHOLE_SOURCE",
    "LoraAdapter",
    "ModelSection",
    "NoAdapter",
    "Quantization",
    "Recipe",
    "architecture_model",
    "kind_in",
    "refused_keys",
    "section_model",
]
