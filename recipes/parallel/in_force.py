"""That a run is what was asked for: so many processes, in one group, spread as the strategy says."""

from typing import Any

from transformers.trainer_callback import TrainerCallback

from ..errors import UserError
from .strategy import Parallel, Strategy
from .world import gathered
from .zero import is_engine, shares_work


class InForce(TrainerCallback):
    """Stops a run at its start if model and processes are not spread as asked.

    Args:
        trainer: whose model is looked at once it is prepared.
        same: what must be equal in all processes, by what it is, such as the recipe and the digest of the data.
    """

    def __init__(self, trainer: Any, asked: Parallel, same: dict[str, str]) -> None:
        self.trainer, self.asked, self.same = trainer, asked, same

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check(self.trainer, self.asked, self.same)


def check(trainer: Any, asked: Parallel, same: dict[str, str]) -> None:
    """Raises:
    UserError: another strategy or number of processes is in force, or the processes do not train the same.
    """
    processes = counted()
    found = strategy_of(trainer, processes)
    if (found, processes) != (asked.strategy, asked.processes):
        raise UserError(
            f"{asked.describe()} was asked for, but in force is {Parallel(found, processes).describe()}. "
            "Nothing was trained"
        )
    for what in same:
        values = gathered(same[what])
        if len(set(values)) > 1:
            odd = next(rank for rank, value in enumerate(values) if value != values[0])
            raise UserError(f"process {odd} has another {what} than process 0: all must run the same command")


def counted() -> int:
    """Processes that really add up, not those that an environment names."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    from accelerate import PartialState

    one = torch.ones((), dtype=torch.long, device=PartialState().device)
    torch.distributed.all_reduce(one)
    return int(one)


def strategy_of(trainer: Any, processes: int) -> Strategy:
    """How the prepared model of a trainer is spread over so many processes."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    wrapped = trainer.model_wrapped
    if trainer.is_deepspeed_enabled:
        return "deepspeed" if is_engine(wrapped) and shares_work(wrapped, processes) else "one"
    wrapped = getattr(wrapped, "_orig_mod", wrapped)  # of torch.compile
    if isinstance(wrapped, DistributedDataParallel):
        return "ddp"
    split = [p for p in wrapped.parameters() if isinstance(p, DTensor) and p.device_mesh.size() == processes > 1]
    if any(placement.is_shard() for p in split for placement in p.placements):
        return "fsdp2" if any(isinstance(module, FSDPModule) for module in wrapped.modules()) else "tp"
    return "one"
