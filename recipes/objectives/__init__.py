"""What a recipe's `objective` means: one file a kind, each a subclass of `base.Objective`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Objective


def objective_class(kind: str, architecture: str = "decoder") -> "type[Objective]":
    """The class behind an objective's `kind` for models of an architecture; its module is imported only now."""
    from ..schema import OBJECTIVES

    entry = OBJECTIVES[kind]
    module, _, name = entry.code_by_shape.get(architecture, entry.code).partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)
