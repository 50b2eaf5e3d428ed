"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, sec. 3) by the plan in the model's config."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..training.unfinished import SAVING, discard
from .world import current, wait

# Parameters of which each process has all and uses them for its own heads.
NORMS_OF_HEADS = (
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.q_norm.bias",
    "self_attn.k_norm.bias",
)


def split(model: Any, folder: Path) -> Any:
    """The model with a part of each weight in this process, all of it as the first process has it.

    Args:
        folder: seen by all processes; the whole weights lie in it for a moment.

    Raises:
        UserError: the model cannot be split among so many processes.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    parallel, place = current(), folder / SAVING / "whole"  # which the next start clears after a kill
    try:
        if parallel.main:
            model.save_pretrained(place)
        wait()
        mine = type(model).from_pretrained(
            place,
            dtype=model.dtype,
            attn_implementation=model.config._attn_implementation,
            distributed_config=DistributedConfig(tp_size=parallel.processes),
        )
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"--launch tp: {error}") from error
    finally:
        wait()
        if parallel.main:
            discard(folder)
    _add_up_gradients(mine)
    return mine.train()


def _add_up_gradients(model: Any) -> None:
    """Norms of single heads have their gradient from this process's heads alone: add up those of all.

    On each gradient before it is accumulated; the library's style for it adds up the accumulated sum again and again.
    """
    import torch

    def added(gradient: Any) -> Any:
        torch.distributed.all_reduce(gradient)
        return gradient

    for name, parameter in model.named_parameters():
        if name.endswith(NORMS_OF_HEADS):
            parameter.register_hook(added)
