"""Checkpoints that runs on other numbers of processes, and with another strategy, resume from.

Two layouts exist: whole, as one process and DDP write it, and sharded by torch.distributed.checkpoint, as Accelerate
writes it for FSDP2. Tensor parallelism, which the library does not resume, uses the sharded one as well.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..training.manifest import MANIFEST, SHARDED_MODEL, SHARDED_OPTIMIZER
from .world import current
from .zero import is_engine, load_whole

# Files of the whole layout, and of both.
WHOLE_OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


def is_sharded_checkpoint(checkpoint: Path) -> bool:
    return (checkpoint / SHARDED_MODEL).is_dir()


class AnyLayout:
    """A part of a trainer: it reads both layouts, whatever its own strategy, and writes its strategy's."""

    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    args: Any
    state: Any
    is_fsdp_enabled: bool

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

        _write({"model": get_model_state_dict(self.model)}, Path(output_dir) / SHARDED_MODEL)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if current().strategy != "tp":
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        import torch

        _write({"optimizer": _optimizer_state(self)}, Path(output_dir) / SHARDED_OPTIMIZER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Raises:
        UserError: it cannot be read.
        """
        checkpoint = Path(resume_from_checkpoint)
        with _faults_of_reading(checkpoint):
            if current().strategy == "deepspeed":  # only where nothing is left to train, and no engine was made
                load_whole(self.model, checkpoint)
            elif self._reads_by_library(checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            else:
                _load_model(self.model, checkpoint)

    def _load_best_model(self) -> None:
        """Raises:
        UserError: it cannot be read.
        """
        checkpoint, by_engine = Path(self.state.best_model_checkpoint), current().strategy == "deepspeed"
        with _faults_of_reading(checkpoint):
            if by_engine and not is_engine(self.model_wrapped):
                load_whole(self.model, checkpoint)
            elif by_engine or self._reads_by_library(checkpoint):
                super()._load_best_model()  # type: ignore[misc]
            else:
                _load_model(self.model, checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Raises:
        UserError: the checkpoint cannot be read.
        """
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        with _faults_of_reading(folder):
            if self._is_read_by_library(folder):
                super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            else:
                self._load_other_optimizer(folder)

    def _load_other_optimizer(self, folder: Path) -> None:
        import torch
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        held = _optimizer_state(self)  # makes an empty state first
        if is_sharded_checkpoint(folder):
            _read({"optimizer": {"state": held["state"]}}, folder / SHARDED_OPTIMIZER)
            options = None
        else:
            whole = torch.load(folder / WHOLE_OPTIMIZER, map_location="cpu", weights_only=True)
            order = _order(self)
            held["state"] = {order[number]: state for number, state in whole["state"].items()}
            options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, _plain(self.optimizer), held, options=options)
        self.lr_scheduler.load_state_dict(_for_groups(_schedule(folder), len(self.optimizer.param_groups), folder))
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate  # a schedule sets it only after the next step

    def _is_read_by_library(self, checkpoint: Path) -> bool:
        """Whether the library reads a checkpoint's optimiser and schedule, or DeepSpeed's engine has done so."""
        if current().strategy == "deepspeed":
            return True
        return self._reads_by_library(checkpoint) and self._has_groups_of(checkpoint)

    def _has_groups_of(self, checkpoint: Path) -> bool:
        """Whether the optimiser has as many groups of parameters: tensor parallelism makes more."""
        if not is_sharded_checkpoint(checkpoint):
            return True
        return len(_schedule(checkpoint)["base_lrs"]) == len(self.optimizer.param_groups)

    def _reads_by_library(self, checkpoint: Path) -> bool:
        """Whether the layout is the one that the library writes for this run's strategy.

        Raises:
            UserError: an adapter's checkpoint of the other layout, which holds no whole model.
        """
        sharded = is_sharded_checkpoint(checkpoint)
        by_library = current().strategy == "fsdp2" if sharded else not current().sharded
        if not by_library and hasattr(self.model, "peft_config"):
            wrote = "FSDP2" if sharded else "one process or DDP"
            raise UserError(f"{checkpoint} was written by {wrote}: an adapter goes on only with the strategy it began")
        return by_library


@contextmanager
def _faults_of_reading(checkpoint: Path) -> Iterator[None]:
    """Raises:
    UserError: a checkpoint without a list of its files, so that nobody knew, is damaged.
    """
    import torch
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

    if (checkpoint / MANIFEST).is_file():  # its files are as they were written
        yield
        return
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (
        OSError,
        EOFError,
        LookupError,
        RuntimeError,
        ValueError,
        pickle.UnpicklingError,
        SafetensorError,
        CheckpointException,
    ) as error:
        raise UserError(
            f"{checkpoint} cannot be read and has no {MANIFEST} that would have told ({type(error).__name__}). Remove "
            "it to go on from the one before it, or give --overwrite in place of --resume to start again"
        ) from error


def _load_model(model: Any, checkpoint: Path) -> None:
    """The weights of a checkpoint in the layout that the library does not read."""
    if is_sharded_checkpoint(checkpoint):
        _load_sharded_model(model, checkpoint / SHARDED_MODEL)
    else:
        _load_whole_model(model, checkpoint)


def _schedule(checkpoint: Path) -> dict[str, Any]:
    import torch

    return torch.load(checkpoint / SCHEDULER, weights_only=True)


def _plain(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)  # of Accelerate's wrapper


def _optimizer_state(trainer: Any) -> dict[str, Any]:
    """State of the optimiser by the names of the parameters, on DTensors where the parameters are."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(trainer.model, _plain(trainer.optimizer))


def _order(trainer: Any) -> list[str]:
    """The trained parameters in the order in which the optimiser counts them: those that decay first, Muon's last."""
    from ..training.optimizers import MUON, muon_parameters

    trained = {name: parameter for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    muons = {id(p) for p in muon_parameters(trainer.model)} if getattr(trainer.args, MUON, None) else set()
    return sorted(trained, key=lambda name: (id(trained[name]) in muons, name not in decayed))


def _for_groups(schedule: dict[str, Any], groups: int, checkpoint: Path) -> dict[str, Any]:
    """The state of a schedule for another number of groups of parameters, as tensor parallelism makes them.

    Raises:
        UserError: groups have learning rates of their own, and it is not known which is which.
    """
    lists = {name: value for name, value in schedule.items() if isinstance(value, list) and len(value) != groups}
    for name, value in lists.items():
        if any(item != value[0] for item in value):
            raise UserError(
                f"{checkpoint}: groups of parameters differ in {name}, so the run goes on only with the strategy and "
                "the kind of processes that it began with"
            )
    return schedule | {name: value[:1] * groups for name, value in lists.items()}


def _load_sharded_model(model: Any, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    held = get_model_state_dict(model)
    _read({"model": held}, folder)
    set_model_state_dict(model, held)


def _load_whole_model(model: Any, checkpoint: Path) -> None:
    """Every process reads all the weights and keeps its part."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    weights: dict[str, Any] = {}
    for file in sorted(checkpoint.glob("model*.safetensors")):
        weights |= load_file(file)
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        weights.setdefault(name, weights[source])  # a tied one is saved once
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def _write(state: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=str(folder))


def _read(state: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(state, checkpoint_id=str(folder))
