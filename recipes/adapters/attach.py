"""From a recipe's `adapter` section to a model that trains what it says."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..soft_prompts import ENCODER_FILE
from . import saved
from .targets import check_targets, expert_parameters, ia3_targets, left_out, linear_names, modules_of_parts
from .targets import trained_in_place as _trained_in_place

if TYPE_CHECKING:
    from peft import PeftConfig

    from ..objectives.base import Objective

_CONFIGS = {
    "lora": "LoraConfig",
    "ia3": "IA3Config",
    "prompt-tuning": "PromptTuningConfig",
    "p-tuning": "PromptEncoderConfig",
    "prefix-tuning": "PrefixTuningConfig",
}


def peft_config(
    adapter: Any, objective: "type[Objective] | Objective", model: Any, tokenizer_path: str = "model.tokenizer"
) -> "PeftConfig | None":
    """The PEFT config of an `adapter` section; None where the model's own weights are trained.

    Args:
        model: that it is for, with or without storage.
        tokenizer_path: the tokenizer's folder or Hub id, for a prompt that starts from a text; not read before the
            adapter is attached.

    Raises:
        UserError: values that PEFT refuses, or names and parts that the model does not have.
    """
    import peft

    if adapter.in_place:
        return None
    if adapter.path is not None:
        return _config_of_folder(adapter.path, objective)
    arguments = copy.deepcopy(adapter.arguments())  # PEFT writes into lists
    if adapter.kind in saved.SOFT_PROMPTS:
        arguments |= _prompt_arguments(adapter, model, tokenizer_path)
    elif adapter.kind == "lora":
        arguments |= _lora_targets(adapter, model)
    elif arguments.get("target_modules") is None:
        arguments |= ia3_targets(model)
    if arguments.get("target_modules") == "all-linear":
        arguments["exclude_modules"] = _excluded(arguments.get("exclude_modules"), left_out(model))
    try:
        return getattr(peft, _CONFIGS[adapter.kind])(**arguments, task_type=objective.task_type)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"adapter: {error}") from error


def _config_of_folder(folder: str, objective: Any) -> "PeftConfig":
    from peft import PeftConfig

    try:
        task = saved.read_config(folder).get("task_type")
        if objective is not None and task != objective.task_type:
            raise UserError(
                f"adapter.path: {folder} was trained for {task}, this objective trains {objective.task_type}"
            )
        config = PeftConfig.from_pretrained(str(Path(folder).expanduser()))
    except (saved.BadAdapterError, ValueError, TypeError) as error:
        raise UserError(f"adapter.path: {error}") from error
    # Of a prompt whose encoder was not kept the finished vectors are trained, see `soft_prompts.continue_training`.
    kept = not saved.has_encoder(saved.read_config(folder)) or (Path(folder).expanduser() / ENCODER_FILE).is_file()
    config.inference_mode = not kept
    return config


def _lora_targets(adapter: Any, model: Any) -> dict[str, Any]:
    start = adapter.arguments().get("init_lora_weights")
    if start in ("corda", "eva", "lora_ga"):
        raise UserError(
            f"adapter.init_lora_weights: {start} takes its first matrices from a pass over data that is not made here; "
            "it would train from the default start. Choose true, gaussian, pissa, olora or orthogonal"
        )
    parts = adapter.target_parts
    if parts is None:
        return {}
    # An empty list, not None: PEFT would look the model type up in its own table.
    targets: dict[str, Any] = {"target_modules": modules_of_parts(model, [p for p in parts if p != "experts"])}
    if "experts" in parts:
        given = adapter.arguments().get("target_parameters") or []
        targets["target_parameters"] = sorted({*given, *expert_parameters(model)})
    return targets


def _excluded(given: Any, more: list[str]) -> Any:
    if isinstance(given, str):  # a pattern
        return "|".join([f"(?:{given})", *(rf"(?:.*\.)?{name}" for name in more)])
    return sorted({*(given or ()), *more}) or None


def _prompt_arguments(adapter: Any, model: Any, tokenizer_path: str) -> dict[str, Any]:
    from ..soft_prompts import prompt_learning_fields

    arguments: dict[str, Any] = prompt_learning_fields(model.config, adapter.kind)
    if getattr(adapter, "prompt_tuning_init", None) == "TEXT":
        path = Path(tokenizer_path)
        gguf = tokenizer_path.endswith(".gguf")
        arguments["tokenizer_name_or_path"] = str(path.parent) if gguf else tokenizer_path
        arguments["tokenizer_kwargs"] = {"gguf_file": path.name} if gguf else None
    return arguments


def attach(model: Any, config: "PeftConfig") -> Any:
    """The model with a fresh adapter.

    Raises:
        UserError: the adapter names modules that the model does not have; lists those that it has.
    """
    from peft import get_peft_model

    check_targets(model, config)
    targets: Any = config
    if targets.task_type == "TOKEN_CLS" and getattr(targets, "target_modules", None) == "all-linear":
        # The new last layer is trained whole; of a classifier of texts PEFT knows that by itself.
        targets.exclude_modules = targets.exclude_modules or ["score"]
    try:
        return get_peft_model(model, config)
    except (ValueError, RuntimeError, IndexError, AttributeError, ImportError, TypeError) as error:
        raise UserError(f"adapter: {error}\nThe model's linear modules are: {linear_names(model)}") from error


def train_in_place(model: Any, adapter: Any) -> None:
    """Let only those of the model's own weights train that the recipe names."""
    if adapter.kind == "freeze":
        chosen = set(_trained_in_place(model, adapter.train))
        model.requires_grad_(False)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in chosen:
                parameter.requires_grad_(True)


def continue_from(model: Any, folder: str) -> Any:
    """The model with the adapter of a folder, ready to train on.

    Args:
        model: with as many rows in its embedding as the adapter needs, see `fit_vocabulary`.

    Raises:
        UserError: the adapter does not fit the model.
    """
    from peft import PeftModel

    from ..soft_prompts import continue_training

    path = Path(folder).expanduser()
    try:
        if saved.kind_of_saved(path) in saved.SOFT_PROMPTS:
            model = continue_training(model, path)
        else:
            check_targets(model, _config_of_folder(folder, None))
            model = PeftModel.from_pretrained(model, str(path), is_trainable=True)
        # At each checkpoint PEFT would read a named base's config with our class, which a foreign one does not fit.
        model.peft_config["default"].base_model_name_or_path = ""
        return model
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise UserError(f"adapter.path: {folder} does not fit the model: {error}") from error


def fit_vocabulary(model: Any, rows: int) -> None:
    """Add rows to embedding and head; those that are there stay as they are."""
    held = model.get_input_embeddings().weight.shape[0]
    if rows > held:
        model.resize_token_embeddings(rows, mean_resizing=False)
