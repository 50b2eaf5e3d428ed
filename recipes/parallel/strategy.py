"""Which way of training on several processes is asked for: read from the command line and from what a launcher set.

Nothing here imports torch: it is read before anything else of a run.
"""

import difflib
import importlib.resources
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..errors import UserError

# one: a single process. ddp: each process has the whole model and other rows (Li et al. 2020, arXiv:2006.15704).
# fsdp2: each has a part of every weight and other rows (Zhao et al. 2023, arXiv:2304.11277). tp: each has a part of
# every weight and the same rows (Shoeybi et al. 2019, arXiv:1909.08053, sec. 3). deepspeed: as its own file says
# (Rajbhandari et al. 2020, arXiv:1910.02054).
Strategy = Literal["one", "ddp", "fsdp2", "tp", "deepspeed"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class Parallel:
    """How a run is spread over processes.

    Attributes:
        processes: of the whole run, on all machines.
        rank: this process among them.
    """

    strategy: Strategy = "one"
    processes: int = 1
    rank: int = 0

    @property
    def replicas(self) -> int:
        """Groups of processes that see rows of their own: what a step's rows are divided by."""
        return 1 if self.strategy == "tp" else self.processes

    @property
    def main(self) -> bool:
        """The process that writes and speaks."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """No process holds the whole model."""
        return self.strategy in ("fsdp2", "tp", "deepspeed")

    def describe(self) -> str:
        """One line, for the plan."""
        how = {
            "one": "one process",
            "ddp": "data parallel (DDP): the whole model in each",
            "fsdp2": "sharded data parallel (FSDP2): a part of each weight in each",
            "tp": "tensor parallel: a part of each weight in each, the same rows",
            "deepspeed": "DeepSpeed, as its config file says",
        }[self.strategy]
        count = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return how if self.strategy == "one" else f"{count}, {how}"


def launch_file(strategy: str) -> Path:
    """The file of a strategy for `accelerate launch`."""
    return Path(str(importlib.resources.files("anyformer.configs"))) / "accelerate" / f"{strategy}.yaml"


def launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of a group."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def asked_for(launch: str | None, processes: int | None, environ: Mapping[str, str] = os.environ) -> Parallel:
    """What this process is to be part of.

    Args:
        launch: the strategy by name, as `--launch` gives it; None: what the launcher's own settings say.
        processes: of the whole run, as `--processes` gives it.

    Raises:
        UserError: launcher and command line contradict each other, or the launcher started fewer processes than it was
            asked for.
    """
    _require_group(environ)
    world = int(environ.get("WORLD_SIZE", 1))
    meant = _of_launcher(world, environ)
    strategy = meant if launch is None else named(launch)
    if launch is not None and meant not in ("ddp", "one", strategy):
        raise UserError(f"--launch {strategy}, but the launcher is set up for {meant}: leave out one of the two")
    if processes is not None and processes != world:
        if launch == "one":
            raise UserError(f"--launch one is one process: leave out --processes {processes}, or --launch ddp")
        if not launched(environ):
            raise UserError(f"--processes {processes} needs --launch too, which says how: ddp, fsdp2 or tp")
        raise UserError(f"--processes {processes}, but the launcher started {world}")
    if world == 1 and strategy not in ("one", "ddp", "deepspeed"):
        raise UserError(
            f"{strategy} is asked for, but there is one process only: it would train without being sharded. Start "
            f"several with `anyformer train RECIPE --launch {strategy} --processes 2`"
        )
    if world > 1 and strategy == "one":
        raise UserError(f"--launch one, but the launcher started {world} processes: give ddp, fsdp2, tp or deepspeed")
    return Parallel("one" if world == 1 and strategy == "ddp" else strategy, world, int(environ.get("RANK", 0)))


def named(name: str) -> Strategy:
    """Raises:
    UserError: there is no such strategy.
    """
    for strategy in STRATEGIES:
        if name == strategy:
            return strategy
    near = difflib.get_close_matches(name, STRATEGIES, n=1)
    hint = f"did you mean {near[0]}? There" if near else "there"
    raise UserError(f"--launch {name}: no such strategy; {hint} are {', '.join(STRATEGIES)}")


def check_shared(rows: int, processes: int) -> None:
    """Raises:
    UserError: `train.global_batch_size` rows cannot be shared evenly by processes that each read their own.
    """
    if rows % processes:
        raise UserError(
            f"train.global_batch_size: {rows} rows a step cannot be shared by {processes} processes: it must be a "
            f"multiple of {processes}, or use another number of processes"
        )


def _true(name: str, environ: Mapping[str, str]) -> bool:
    return environ.get(name, "").lower() in ("1", "true", "yes")


def _of_launcher(world: int, environ: Mapping[str, str]) -> Strategy:
    """What the environment that `accelerate launch` makes of its file says."""
    if _true("ACCELERATE_USE_DEEPSPEED", environ):
        return "deepspeed"
    if _true("ACCELERATE_USE_MEGATRON_LM", environ):
        raise UserError("Accelerate's file asks for Megatron-LM, which does not train these models: use fsdp2 or tp")
    if _true("ACCELERATE_USE_FSDP", environ):
        if environ.get("FSDP_VERSION", "1") != "2":
            raise UserError("Accelerate's file asks for FSDP version 1: set fsdp_config.fsdp_version to 2")
        return "fsdp2"
    return "ddp" if world > 1 else "one"


def _require_group(environ: Mapping[str, str]) -> None:
    """Raises:
    UserError: Accelerate was asked for several processes and started one, which knows nothing of others.
    """
    by_accelerate, several = "ACCELERATE_MIXED_PRECISION" in environ, "MASTER_ADDR" in environ
    if by_accelerate and several and not launched(environ):
        raise UserError(
            "Accelerate was asked for several processes and started one alone, as its distributed_type MULTI_CPU does "
            "without mpirun. Use `anyformer train RECIPE --launch ddp --processes N`, or a file of configs/accelerate"
        )
