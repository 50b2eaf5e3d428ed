"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, sec. 3) by the plan in the model's config."""

import shutil
from pathlib import Path
from typing import Any

from ..errors import UserError
from .world import current, wait


def split(model: Any, folder: Path) -> Any:
    """The model with a part of each weight in this process, all of it as the first process has it.

    Args:
        folder: seen by all processes; the whole weights lie in it for a moment.

    Raises:
        UserError: the model cannot be split among so many processes.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    parallel, place = current(), folder / ".whole"
    check_divisible(model.config, parallel.processes)
    try:
        if parallel.main:
            model.save_pretrained(place)
        wait()
        return (
            type(model)
            .from_pretrained(
                place,
                dtype=model.dtype,
                attn_implementation=model.config._attn_implementation,
                distributed_config=DistributedConfig(tp_size=parallel.processes),
            )
            .train()
        )
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"--launch tp: {error}") from error
    finally:
        wait()
        if parallel.main:
            shutil.rmtree(place, ignore_errors=True)


def check_divisible(config: Any, processes: int) -> None:
    """Raises:
    UserError: heads or widths are no multiple of the number of processes.
    """
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value % processes:
            raise UserError(
                f"--launch tp: {name} is {value}, which {processes} processes cannot share evenly: use fsdp2, or "
                "another number of processes"
            )
