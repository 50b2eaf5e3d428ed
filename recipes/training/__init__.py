"""What this suite adds to the trainers of transformers and TRL, each a part of its own."""

import functools
from typing import Any


@functools.cache
def extended(trainer_class: Any) -> Any:
    """A library's trainer class with this suite's parts in front of it; those it has already are not put on again."""
    from ..parallel.checkpoints import AnyLayout
    from ..parallel.order import SameOrder
    from .checkpoints import WholeCheckpoints
    from .interruptions import DefinedEnds
    from .metrics import Metered
    from .optimizers import Optimizing

    # The first wraps the others.
    parts = (DefinedEnds, Metered, Optimizing, WholeCheckpoints, SameOrder, AnyLayout)
    missing = tuple(part for part in parts if not issubclass(trainer_class, part))
    return type(trainer_class.__name__, (*missing, trainer_class), {}) if missing else trainer_class
