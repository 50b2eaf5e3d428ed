"""What the first process decides for all."""

from collections.abc import Callable
from typing import TypeVar

from ..errors import UserError

T = TypeVar("T")


def of_first_process(decide: Callable[[], T]) -> T:
    """What `decide` answers in the first process, in all of them.

    Raises:
        UserError: it raises one there.
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    state = PartialState()
    if state.num_processes == 1:
        return decide()
    told: list = [None, None]
    if state.is_main_process:
        try:
            told[0] = decide()
        except UserError as error:
            told[1] = str(error)
    broadcast_object_list(told)
    if told[1] is not None:
        raise UserError(told[1])
    return told[0]
