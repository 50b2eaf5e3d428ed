"""What a run adds to the trainers of all objectives: mixins that stand before the library's class."""

import functools
from typing import Any


@functools.cache
def extended(trainer_class: Any) -> Any:
    """A trainer's class with all mixins of this package; of the same name, which libraries look at."""
    from .metrics import Metered
    from .optimizers import Optimizing

    mixins = (Metered, Optimizing)
    return type(trainer_class.__name__, (*mixins, trainer_class), {"__doc__": trainer_class.__doc__})
