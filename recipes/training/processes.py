"""What the first process decides for all."""

from collections.abc import Callable
from typing import TypeVar

from ..errors import UserError
from ..parallel.world import current, gathered

T = TypeVar("T")


def of_first_process(decide: Callable[[], T]) -> T:
    """What `decide` answers in the first process, in all of them.

    Raises:
        UserError: it raises one there.
    """
    answer, fault = None, None
    if current().main:
        try:
            answer = decide()
        except UserError as error:
            if current().processes == 1:
                raise
            fault = str(error)
    answer, fault = gathered((answer, fault))[0]
    if fault is not None:
        raise UserError(fault)
    return answer
