"""What no single key of a recipe's `train` section can see: optimiser, schedule, checkpointing and reports."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from .introspection import function_parameters
from .yaml_tree import Path, show

Fault = tuple[Path, str]

# Schedules -> the library's function that makes each; all but the first take keywords of their own.
SCHEDULES = {
    "constant": "get_constant_schedule",
    "constant_with_warmup": "get_constant_schedule_with_warmup",
    "linear": "get_linear_schedule_with_warmup",
    "cosine": "get_cosine_schedule_with_warmup",
    "cosine_with_restarts": "get_cosine_with_hard_restarts_schedule_with_warmup",
    "polynomial": "get_polynomial_decay_schedule_with_warmup",
    "inverse_sqrt": "get_inverse_sqrt_schedule",
    "cosine_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup",
    "cosine_warmup_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    "warmup_stable_decay": "get_wsd_schedule",
}
# What the trainer itself gives to these functions.
GIVEN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
SHAPES = ("linear", "cosine", "1-sqrt")
# Names of places to report to -> the modules of which one is needed, and the package that brings it.
REPORTS = {
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    "trackio": (("trackio",), "trackio"),
    "wandb": (("wandb",), "wandb"),
}
# Keywords of torch.utils.checkpoint.checkpoint that a recipe can write, and the trainer's own two.
CHECKPOINTING: dict[str, Any] = {
    "use_reentrant": bool,
    "preserve_rng_state": bool,
    "determinism_check": str,
    "early_stop": bool,
    "debug": bool,
    "every_n_layers": int,
    "offload": bool,
}
# Objectives whose loss is the model's own, which alone knows the z-loss.
OWN_LOSS = ("pretrain", "mlm", "mlm-nsp", "sft", "seq2seq")


def across_training(kind: str, sections: dict[str, dict[str, Any]], defaults: dict[str, Any]) -> Iterator[Fault]:
    """Faults of the `train` section of a recipe whose objective is of `kind`.

    Args:
        defaults: of the fields of the trainer's config.
    """
    train = defaults | sections["train"]
    yield from _reports(sections["train"].get("report_to"))
    yield from _schedule(train)
    yield from _checkpointing(sections["train"], train)
    if train.get("optim") == "muon" and sections["adapter"].get("lora_plus_lr_ratio") is not None:
        text = "sets the learning rates of AdamW's groups, but train.optim is muon: remove one of the two"
        yield ("adapter", "lora_plus_lr_ratio"), text
    config = sections["model"].get("config")
    if isinstance(config, dict) and config.get("z_loss_coef"):
        yield from _z_loss(kind, train)


def _reports(value: Any) -> Iterator[Fault]:
    for name in value if isinstance(value, list) else [value]:
        modules, package = REPORTS.get(name, ((), "")) if isinstance(name, str) else ((), "")
        if modules and not any(importlib.util.find_spec(module) for module in modules):
            yield ("train", "report_to"), f"{name} is not installed: pip install {package}, or remove the name"


def _schedule(train: dict[str, Any]) -> Iterator[Fault]:
    here, kind = ("train", "lr_scheduler_kwargs"), train.get("lr_scheduler_type")
    given = train.get("lr_scheduler_kwargs") or {}
    if kind not in SCHEDULES or not isinstance(given, dict):
        return
    parameters = function_parameters("transformers.optimization", SCHEDULES[kind])
    own = {name: needed for name, needed in parameters.items() if name not in GIVEN}
    for name, value in given.items():
        if name not in own:
            takes = f"takes {', '.join(own)}" if own else "takes none"
            yield (*here, name), f"is no keyword of the schedule {kind}, which {takes}"
        elif name in ("warmup_type", "decay_type") and value not in SHAPES:
            yield (*here, name), f"must be {', '.join(SHAPES[:-1])} or {SHAPES[-1]}, found {show(value)}"
        elif name.endswith("_steps") and not _is_count(value):
            yield (*here, name), f"must be a whole number of at least 0, found {show(value)}"
        elif name in ("min_lr_ratio", "min_lr_rate") and not 0 <= _number(value, -1) <= 1:
            yield (*here, name), f"must be a share from 0 to 1, found {show(value)}"
    if missing := [name for name, needed in own.items() if needed and name not in given]:
        example = ", ".join(f"{name}: 100" for name in missing)
        yield here if given else ("train", "lr_scheduler_type"), f"{kind} needs lr_scheduler_kwargs: {{{example}}}"


def _number(value: Any, otherwise: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _checkpointing(given: dict[str, Any], train: dict[str, Any]) -> Iterator[Fault]:
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        values = given.get(name)
        if not isinstance(values, dict):
            continue
        for key, value in values.items():
            kind = CHECKPOINTING.get(key)
            if kind is None:
                yield ("train", name, key), f"unknown key; known: {', '.join(CHECKPOINTING)}"
            elif type(value) is not kind or (key == "every_n_layers" and value < 1):
                shown = {bool: "true or false", str: "text", int: "a whole number of at least 1"}[kind]
                yield ("train", name, key), f"must be {shown}, found {show(value)}"
        if not (train.get("activation_checkpointing") or train.get("gradient_checkpointing")):
            yield ("train", name), "has no effect: set train.activation_checkpointing to true"


def _z_loss(kind: str, train: dict[str, Any]) -> Iterator[Fault]:
    here: Path = ("model", "config", "z_loss_coef")
    if kind not in OWN_LOSS:
        yield here, f"is no part of the loss of {kind}; it is of {', '.join(OWN_LOSS)}: remove it"
    elif train.get("label_smoothing_factor"):
        yield here, "is left out where the trainer smooths labels: remove it, or train.label_smoothing_factor"
    elif kind == "sft" and train.get("loss_type", "nll") != "nll":
        yield here, f"is left out of the loss {train['loss_type']}: remove one of the two"
