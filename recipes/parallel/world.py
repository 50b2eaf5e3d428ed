"""The group of processes that a run is part of, and what they do together."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import UserError
from . import zero
from .strategy import Parallel, launch_file

T = TypeVar("T")
# Processes wait for the first one while it reads and tokenises a corpus.
PATIENCE = timedelta(hours=24)
# So long another process waits before it tells its own fault: the first one usually has the same and ends them all.
_AFTER_THE_FIRST = 10.0
# Seconds in which threads of a closed group let go of what they hold: they need some microseconds.
_LET_GO = 0.2

_current = Parallel()


def current() -> Parallel:
    """How this run is spread; one process where `begin` was not called."""
    return _current


@contextmanager
def begun(parallel: Parallel) -> Iterator[Parallel]:
    """Join the group of a run, and leave it at the end.

    Raises:
        UserError: the strategy needs what is not there, or another process is gone.
    """
    global _current
    before, _current = _current, parallel
    environment = dict(os.environ)
    try:
        if parallel.strategy != "one":
            _join(parallel)
        yield parallel
    except UserError:
        if not parallel.main:
            time.sleep(_AFTER_THE_FIRST)
        raise
    except RuntimeError as error:
        if parallel.processes == 1 or not _other_is_gone(error):
            raise
        time.sleep(_AFTER_THE_FIRST)  # meanwhile the launcher sees which one it was, tells it and ends this one
        raise UserError(f"another process of this run has ended, or cannot be reached any more ({error})") from error
    finally:
        _current = before
        os.environ.clear()
        os.environ.update(environment)


def leave() -> None:
    """Close the group, at the end of this process."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        # Threads of gloo free the tensors of the last exchange under Python's lock, and one that asks for it while the
        # interpreter ends aborts the process, whose run is finished by then. They get the lock while this one sleeps.
        time.sleep(_LET_GO)


def _other_is_gone(error: RuntimeError) -> bool:
    import torch

    # Of gloo, of NCCL and of the store; a fault of this process's own says something else.
    said = ("by peer", "Broken pipe", "remote process exited", "was likely closed", "Timed out", "timed out")
    of_a_group = "gloo" in str(error) or isinstance(error, torch.distributed.DistError)
    return of_a_group and any(text in str(error) for text in said)


def _join(parallel: Parallel) -> None:
    import torch
    from accelerate import PartialState

    on_cpu = not torch.accelerator.is_available()
    if parallel.strategy == "deepspeed":
        zero.get_ready(on_cpu=on_cpu)
    if parallel.strategy == "fsdp2":
        for name, value in fsdp_environment().items():
            os.environ.setdefault(name, value)
    elif parallel.strategy == "deepspeed" and "ACCELERATE_USE_DEEPSPEED" not in os.environ:
        os.environ.update(zero.environment(_settings("deepspeed", "deepspeed_config")))
    state = PartialState(cpu=on_cpu, timeout=PATIENCE)
    if state.num_processes != parallel.processes:
        raise UserError(
            f"{parallel.processes} processes are asked for, but Accelerate joined {state.num_processes}: they would "
            "train apart"
        )


def shard_on_cpus(arguments: Any) -> None:
    """Let Accelerate shard a model among processes without accelerators; to be called just before a trainer is made.

    Accelerate shards wherever it sees accelerators, and on CPUs silently makes DDP of FSDP, although its own code for
    FSDP2, and that for tensor parallelism, run on gloo.

    Args:
        arguments: of the trainer, which makes Accelerate's state when its device is first asked for.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if _current.strategy in ("fsdp2", "tp") and arguments.device.type == "cpu":
        PartialState().distributed_type = DistributedType.MULTI_GPU


def fsdp_environment() -> dict[str, str]:
    """What `accelerate launch` makes of configs/accelerate/fsdp2.yaml, for processes that torchrun started."""
    settings = _settings("fsdp2", "fsdp_config")
    names = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
    found = {names.get(key, key.upper()): _text(value) for key, value in settings.items()}
    return {"ACCELERATE_USE_FSDP": "true"} | found


def _settings(strategy: str, section: str) -> dict[str, Any]:
    """A section of a strategy's file in configs/accelerate/."""
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(launch_file(strategy))[section]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def wait() -> None:
    """Until every process is here."""
    if _current.processes > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


@contextmanager
def main_first() -> Iterator[None]:
    """The first process goes through a block before the others, which find what it left in caches."""
    if not _current.main:
        wait()
    try:
        yield
    finally:
        if _current.main:
            wait()


def gathered(value: Any) -> list[Any]:
    """A value of each process, in their order; it must be picklable."""
    if _current.processes == 1:
        return [value]
    import torch

    found: list[Any] = [None] * _current.processes
    torch.distributed.all_gather_object(found, value)
    return found


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
