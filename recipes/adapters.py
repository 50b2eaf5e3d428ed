"""Adapters: what a recipe's `adapter` section means for a model."""

import copy
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

    from ..modeling import AnyformerConfig
    from .objectives.base import Objective


def peft_config(adapter: Any, objective: "type[Objective] | Objective") -> "PeftConfig | None":
    """The PEFT config of an `adapter` section, or None for full fine-tuning.

    Raises:
        UserError: values that PEFT refuses.
    """
    if adapter.kind == "none":
        return None
    from peft import LoraConfig

    start = adapter.arguments().get("init_lora_weights")
    if start in ("corda", "eva", "lora_ga"):
        raise UserError(
            f"adapter.init_lora_weights: {start} takes its first matrices from a pass over data that is not made here; "
            "it would train from the default start. Choose true, gaussian, pissa, olora or orthogonal"
        )
    try:
        return LoraConfig(**adapter.arguments(), task_type=objective.task_type)
    except (ValueError, TypeError) as error:
        raise UserError(f"adapter: {error}") from error


def trainable_parameters(config: "AnyformerConfig", adapter: Any, objective: "type[Objective] | Objective") -> int:
    """Parameters that will be trained, counted on a model without storage.

    Raises:
        UserError: the adapter names modules that the model does not have.
    """
    import torch

    from ..modeling import HEADS

    with torch.device("meta"):
        model: Any = HEADS[objective.head](copy.deepcopy(config))  # PEFT may write into it
        foreign = peft_config(adapter, objective)
        if foreign is not None:
            model = attach(model, foreign)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def attach(model: "PreTrainedModel", config: "PeftConfig") -> Any:
    """The model with a fresh adapter.

    Raises:
        UserError: the adapter names modules that the model does not have; lists those that it has.
    """
    from peft import get_peft_model

    _check_targets(model, config)
    try:
        return get_peft_model(model, config)
    except (ValueError, RuntimeError, IndexError, AttributeError, ImportError) as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if type(m).__name__ == "Linear"})
        raise UserError(f"adapter: {error}\nThe model's linear modules are: {', '.join(linear)}") from error


def _check_targets(model: Any, config: Any) -> None:
    """PEFT takes what it finds of a list of names and says nothing of the rest."""
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    wrong = []
    for field, names in (
        ("target_modules", modules),
        ("modules_to_save", modules),
        ("target_parameters", parameters),
    ):
        given = getattr(config, field, None)
        for target in given if isinstance(given, list | set | tuple) else ():
            if not any(name == target or name.endswith(f".{target}") for name in names):
                near = difflib.get_close_matches(target, {n.rsplit(".", 1)[-1] for n in names}, n=1)
                wrong.append(f"{field} names {target!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    if wrong:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if type(m).__name__ == "Linear"})
        raise UserError(
            f"adapter: {'; '.join(wrong)} The model has no such part; its linear modules are: {', '.join(linear)}"
        )
    targets = config.target_modules if isinstance(config.target_modules, list | set) else ()
    if "lm_head" in targets or ("embed_tokens" in targets and model.config.tie_word_embeddings):
        raise UserError(
            "adapter: target_modules holds lm_head, or the embedding of a model whose head is tied to it: the "
            "trainer's loss reads the head's weight directly, and merging would change both. Use modules_to_save"
        )


def merge(model: Any) -> "PreTrainedModel":
    """The plain model with the adapter's change added to its weights; a model without an adapter as it is."""
    restore_forward(model)
    if not hasattr(model, "merge_and_unload"):
        return model
    try:
        return model.merge_and_unload()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"adapter: it cannot be merged: {error}. Set adapter.merge: false") from error


def restore_forward(model: Any) -> None:
    """TRL puts its own forward over the class's; what is measured and saved after training is the class's."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.__dict__.pop("forward", None)


def save_adapter(model: Any, folder: Path, base: str | None, revision: str | None = None) -> None:
    """Write the adapter alone; `base` is the Hub id or folder that it belongs to, where there is one."""
    config = model.peft_config["default"]
    # While saving, PEFT would read a named base's config with our class, which a foreign base does not fit.
    config.base_model_name_or_path = ""
    model.save_pretrained(folder)
    config.base_model_name_or_path, config.revision = base, revision
    config.save_pretrained(folder)


def save_unmerged(model: Any, folder: Path, base: str | None) -> None:
    """Write the adapter to `folder`, so that `AutoModelForCausalLM.from_pretrained(folder)` opens base and adapter.

    Args:
        base: Hub id or folder of the base model; None: it is at neither, so it is written to `folder / "base"`.
    """
    save_adapter(model, folder, base or str((folder / "base").resolve()))
    if base is None:
        model.unload().save_pretrained(folder / "base")


def check_weights(model: Any) -> None:
    """Raises:
    UserError: a weight is not a number; names it.
    """
    for name, parameter in model.named_parameters():
        if not parameter.detach().isfinite().all():
            raise UserError(
                f"{name} holds values that are not numbers: training has diverged. Lower train.learning_rate"
            )


def check_trained(model: Any) -> None:
    """Every LoRA matrix B starts at zero; one that still is zero was never trained.

    Raises:
        UserError: names the modules.
    """
    untrained = [n for n, p in model.named_parameters() if "lora_B" in n and not p.detach().any()]
    if untrained:
        shown = ", ".join(untrained[:3]) + (f" and {len(untrained) - 3} more" if len(untrained) > 3 else "")
        raise UserError(
            f"{len(untrained)} adapter matrices are still zero after training: {shown}. No gradient reached them"
        )
