"""What a recipe's `objective` means: one file a kind, each a subclass of `base.Objective`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Objective


def objective_class(kind: str) -> "type[Objective]":
    """The class behind an objective's `kind`; its module is imported only now."""
    from ..schema import OBJECTIVES

    module, _, name = OBJECTIVES[kind].code.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)
