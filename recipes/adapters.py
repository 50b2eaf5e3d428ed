"""Adapters: what a recipe's `adapter` section means for a model."""

from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

    from ..modeling import AnyformerConfig


def peft_config(adapter: Any) -> "PeftConfig | None":
    """The PEFT config of an `adapter` section, or None for full fine-tuning.

    Raises:
        UserError: values that PEFT refuses.
    """
    if adapter.kind == "none":
        return None
    from peft import LoraConfig

    try:
        return LoraConfig(**adapter.arguments(), task_type="CAUSAL_LM")
    except (ValueError, TypeError) as error:
        raise UserError(f"adapter: {error}") from error


def trainable_parameters(config: "AnyformerConfig", adapter: Any) -> int:
    """Parameters that will be trained, counted on a model without storage.

    Raises:
        UserError: the adapter names modules that the model does not have.
    """
    import torch

    from ..modeling import AnyformerForCausalLM

    with torch.device("meta"):
        model: Any = AnyformerForCausalLM(config)
        foreign = peft_config(adapter)
        if foreign is not None:
            model = attach(model, foreign)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def attach(model: "PreTrainedModel", config: "PeftConfig") -> Any:
    """The model with a fresh adapter.

    Raises:
        UserError: the adapter names modules that the model does not have; lists those that it has.
    """
    from peft import get_peft_model

    try:
        return get_peft_model(model, config)
    except ValueError as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if type(m).__name__ == "Linear"})
        raise UserError(f"adapter: {error}\nThe model's linear modules are: {', '.join(linear)}") from error


def merge(model: Any) -> "PreTrainedModel":
    """The plain model with the adapter's change added to its weights; a model without an adapter as it is."""
    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    # TRL has put its own forward over the class's; what is saved and used from here on is the class's.
    merged.__dict__.pop("forward", None)
    return merged


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
