"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, sec. 3) by the plan in the model's config."""

import shutil
from pathlib import Path
from typing import Any

from ..errors import UserError
from .world import current, wait

OPTIMIZER = "optimizer_0"  # the folder that Accelerate uses for sharded state, too
MODEL = "pytorch_model_fsdp_0"


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


class TensorParallel:
    """A part of a trainer: checkpoints of a model that is split by `split`, which the library does not resume from.

    Weights and optimiser state are written by torch.distributed.checkpoint, so that another number of processes can
    read them.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    args: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        args = options.get("args")
        if current().strategy != "tp" or args is None or args.save_only_model:
            super().__init__(*arguments, **options)
            return
        # The library refuses to keep the optimiser of such a model; here it is kept all the same.
        args.save_only_model = True
        try:
            super().__init__(*arguments, **options)
        finally:
            args.save_only_model = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if current().strategy != "tp" or not _internal_call or output_dir is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        _write({"model": get_model_state_dict(self.model)}, Path(output_dir) / MODEL)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if current().strategy != "tp":
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        import torch
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        _write({"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}, Path(output_dir) / OPTIMIZER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if current().strategy != "tp":
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

        held = {"model": get_model_state_dict(self.model)}
        _read(held, Path(resume_from_checkpoint) / MODEL)
        set_model_state_dict(self.model, held["model"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if current().strategy != "tp" or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        import torch
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

        held = {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}  # makes an empty state first
        _read(held, Path(checkpoint) / OPTIMIZER)
        set_optimizer_state_dict(self.model, self.optimizer, held["optimizer"])
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))


def _write(state: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=str(folder))


def _read(state: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(state, checkpoint_id=str(folder))
