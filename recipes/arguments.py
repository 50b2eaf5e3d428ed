"""The trainers' own config classes, filled from a recipe's `train` section and from what the machine decides."""

import importlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .parallel.strategy import check_shared
from .parallel.world import current
from .schema.sections import GLOBAL_BATCH

if TYPE_CHECKING:
    from transformers import TrainingArguments


def training_arguments(where: tuple[str, str], train: dict[str, Any]) -> "TrainingArguments":
    """The trainer's config for a recipe's `train` section.

    What the recipe leaves open and the machine decides: bf16 mixed precision only where the processor multiplies
    bf16 faster than fp32, pinned memory only beside a GPU, the fused AdamW where torch has it for the device. A run has
    the name of its folder. `optim: muon` is the suite's: `Optimizing` reads it from the attribute `muon`.

    Args:
        where: module and name of the config class.

    Raises:
        UserError: values that the trainer's own config refuses.
    """
    import torch

    from .training.optimizers import MUON, fused_adamw_runs, muon_settings

    module, name = where
    train, gpu = dict(train), torch.cuda.is_available()
    rows = train.pop(GLOBAL_BATCH, None)
    values: dict[str, Any] = {"dataloader_pin_memory": gpu, "report_to": "none", "disable_tqdm": False}
    values["logging_nan_inf_filter"] = False  # a loss that is not a number must be seen, not averaged away
    if not torch.accelerator.is_available():
        values["use_cpu"] = True  # else processes would train apart, and bf16 be refused
    if "bf16" not in train and not train.get("fp16"):
        values["bf16"] = torch.cuda.is_bf16_supported() if gpu else cpu_has_amx()
    muon = train.get("optim") == MUON
    if "optim" not in train and not fused_adamw_runs(torch.device("cuda" if gpu else "cpu")):
        values["optim"] = "adamw_torch"  # which takes foreach where that is faster
    values["run_name"] = Path(train["output_dir"]).name if train.get("output_dir") else None
    given = train | {"optim": "adamw_torch", "optim_args": None} if muon else train
    try:
        kind = getattr(importlib.import_module(module), name)
        if rows is not None:
            values |= _shared(rows, train, kind.per_device_train_batch_size)
        arguments = kind(**(values | given))
        if muon and current().strategy in ("tp", "deepspeed"):
            raise UserError(f"train.optim: muon needs whole matrices, which --launch {current().strategy} takes apart")
        # One layer for all of them, and nothing around them: the loss stays in chunks, and FSDP2 gathers weights by
        # hooks that the call of a model compiled as a whole passes by.
        if arguments.torch_compile:
            os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
        if muon:
            arguments.muon = muon_settings(train.get("optim_args"), arguments.learning_rate)
        _try_optimizer_and_schedule(arguments)
        _try_reports(arguments)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"train: {error}") from error
    return arguments


def _shared(rows: int, train: dict[str, Any], default: int) -> dict[str, int]:
    """How many rows a batch has and how many batches a step, so that a step has `rows` rows over all processes.

    Args:
        default: rows of a batch where the recipe does not say; fewer if they do not fit.

    Raises:
        UserError: the rows cannot be shared evenly.
    """
    replicas, name = current().replicas, "per_device_train_batch_size"
    check_shared(rows, replicas)
    batch = train.get(name, math.gcd(rows // replicas, default))
    if rows % (replicas * batch):
        raise UserError(
            f"train.global_batch_size: {rows} rows a step cannot be shared by {replicas} processes in batches of "
            f"{batch}: it must be a multiple of {replicas * batch}, or train.{name} another"
        )
    return {name: batch, "gradient_accumulation_steps": rows // (replicas * batch)}


def rows_a_step(arguments: "TrainingArguments") -> int:
    """Of an optimiser step, over all processes."""
    return arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * current().replicas


def _try_optimizer_and_schedule(arguments: "TrainingArguments") -> None:
    """The trainer would find a missing package or a wrong keyword only once the weights are loaded."""
    import torch
    from transformers import Trainer, get_scheduler

    Trainer.get_optimizer_cls_and_kwargs(arguments)
    kind, given = arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs or {}
    try:
        get_scheduler(
            kind,
            torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
            num_warmup_steps=1,
            num_training_steps=10,
            scheduler_specific_kwargs=given,  # type: ignore[arg-type]  # a dict by now
        )
    except (ValueError, TypeError) as error:
        name = getattr(kind, "value", kind)
        raise UserError(
            f"train.lr_scheduler_type: {name} with lr_scheduler_kwargs: {given or '{}'}: {error}"
        ) from error


def _try_reports(arguments: "TrainingArguments") -> None:
    """The trainer would find a missing package only once the weights are loaded.

    Raises:
        UserError: a place to report to that is not known or not installed.
    """
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    names: list[str] = list(arguments.report_to or ())
    get_reporting_integration_callbacks(names)  # a ValueError names the known ones
    if absent := [name for name in names if name not in get_available_reporting_integrations()]:
        raise UserError(f"train.report_to: {absent[0]} is not installed: pip install {absent[0]}")


def cpu_has_amx() -> bool:
    """Whether this processor multiplies bf16 in matrix units."""
    flags = Path("/proc/cpuinfo")
    return flags.is_file() and "amx_bf16" in flags.read_text(encoding="utf-8", errors="replace")
