"""What every run's trainer does beyond the library's: checkpoints that are whole or not there, and defined ends."""

import functools
from typing import Any


@functools.cache
def extended(trainer_class: Any) -> Any:
    """The trainer class of a library with this suite's mixins before it; those it has already are not put on again."""
    from .checkpoints import WholeCheckpoints
    from .interruptions import DefinedEnds

    # The first wraps the others.
    mixins = (DefinedEnds, WholeCheckpoints)
    missing = tuple(mixin for mixin in mixins if not issubclass(trainer_class, mixin))
    return type(trainer_class.__name__, (*missing, trainer_class), {}) if missing else trainer_class
