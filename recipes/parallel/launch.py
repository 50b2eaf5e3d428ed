"""`anyformer train RECIPE --launch fsdp2 --processes 2`: the command in several processes, by `accelerate launch`."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from ..errors import UserError
from .strategy import Parallel, check_shared, launch_file, named

# Seconds that processes have for a checkpoint after a SIGTERM; torch's own 30 are short for large models.
PATIENCE = 600
# Processes that a core may have: enough to try a strategy on a small machine.
_A_CORE = 2
# Exit status where a process was ended by a signal: 128 and its number, as shells have it.
_BY_SIGNAL = 128


def launch(strategy: str, processes: int | None, arguments: Sequence[str], rows: int | None = None) -> int:
    """Run `anyformer` with arguments in several processes of this machine.

    Args:
        processes: default: as many as there are GPUs.
        arguments: of the command, the verb first; `--launch` among them, so that each process checks what it is in.
        rows: `train.global_batch_size`, where it is known.

    Returns:
        The exit status: of the first process that failed, 0 if none did.

    Raises:
        UserError: no such strategy, too few processes or too many, or rows that they cannot share.
    """
    count = _processes(named(strategy), processes)
    if rows is not None:
        check_shared(rows, Parallel(named(strategy), count).replicas)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(_cores() // count, 1)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(PATIENCE))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of parameters that are all used
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the process that failed has said why
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--config_file", str(launch_file(strategy)), "--num_processes", str(count)]
    options += ["--main_process_port", "0", "-m", "anyformer", *arguments]
    try:
        launch_command(launch_command_parser().parse_args(options))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode  # and it has said why
        print(_ended_by(rank, -failure.exitcode), file=sys.stderr)
        return _BY_SIGNAL - failure.exitcode
    except SignalException as error:
        return _BY_SIGNAL + error.sigval
    except (ValueError, AssertionError, ImportError) as error:
        raise UserError(f"--launch {strategy}: {error}") from error
    return 0


def _ended_by(rank: int, number: int) -> str:
    """What is said of a process that a signal has ended, and that could not say anything itself."""
    cause = ", as a machine does whose memory is full" if number == signal.SIGKILL else ""
    name = signal.Signals(number).name
    return f"Process {rank} was ended by {name}{cause}. Give the same command with --resume: it goes on, or begins"


def _processes(strategy: str, given: int | None) -> int:
    import torch

    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    count = given or found
    if not count:
        raise UserError(f"--launch {strategy}: there is no GPU to count, so say how many: --processes 2")
    if found and count > found:
        raise UserError(f"--processes {count}: this machine has {found} GPUs")
    if not found and count > (most := max(_A_CORE * _cores(), 4)):
        raise UserError(
            f"--processes {count}: this machine has {_cores()} cores and no GPU; more than {most} processes would only "
            "take its memory"
        )
    if strategy not in ("one", "deepspeed") and count < 2:
        raise UserError(f"--launch {strategy} needs at least two processes, not {count}: leave it out for one")
    return count


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
