"""What this suite adds to the trainers of transformers and TRL, each a part of its own."""

import functools
from typing import Any


@functools.cache
def extended(trainer_class: Any) -> Any:
    """A library's trainer class with this suite's parts in front of it."""
    from ..parallel.checkpoints import AnyLayout
    from ..parallel.order import SameOrder
    from .metrics import Metered
    from .optimizers import Optimizing

    return type(trainer_class.__name__, (Metered, Optimizing, SameOrder, AnyLayout, trainer_class), {})
