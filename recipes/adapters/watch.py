"""Around the trainer: the adapter's own optimiser and precision, and whether training did what the recipe says."""

import hashlib
from collections.abc import Iterable
from typing import Any

from ..errors import UserError
from .report import AdapterPlan


class Watch:
    """What training must have changed.

    Made before the trainer is built and told of it with `begin`.

    Args:
        model: that is handed to the trainer.
        plan: what the recipe trains.
    """

    def __init__(self, model: Any, plan: AdapterPlan) -> None:
        self.plan = plan
        rounded = getattr(model, "is_quantized", False)
        trained = ((n, p) for n, p in model.named_parameters() if rounded and _of_adapter(n) and p.requires_grad)
        self._given = {name: parameter.detach().clone() for name, parameter in trained}
        self._start: dict[str, str] = {}
        self._first_step = 0

    def begin(self, trainer: Any) -> None:
        """Look at the model as the trainer has it.

        Raises:
            UserError: other parameters would be trained than the plan says.
        """
        from ..soft_prompts import made_whole

        model = trainer.model
        if hasattr(model, "peft_config"):
            made_whole(model)
        self._restore_precision(model)
        if self.plan.kind == "none":
            return
        self._require_planned(model)
        trainer.add_callback(_at_begin(self))

    def _restore_precision(self, model: Any) -> None:
        """TRL rounds the trained parameters on a quantised base to bf16, where small updates are lost."""
        for name, parameter in model.named_parameters():
            if name in self._given and parameter.dtype != self._given[name].dtype:
                parameter.data = self._given[name].to(parameter.device)
        self._given.clear()

    def _require_planned(self, model: Any) -> None:
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        missing = self.plan.names - names
        added = {name for name in names - self.plan.names if _of_adapter(name)} if not self.plan.in_place else set()
        if missing or added:
            parts = [f"{what} {_some(n)}" for what, n in (("not trained:", missing), ("trained too:", added)) if n]
            raise UserError(f"adapter: the trainer does not train what the plan says: {'; '.join(parts)}")

    def started(self, model: Any, step: int) -> None:
        """Keep what the trained values are now."""
        self._first_step = step
        self._start = _fingerprints(model)

    def check(self, trainer: Any, unmoved: str) -> None:
        """Make sure that training reached what it had to.

        Args:
            unmoved: why it may not have, as the end of the message.

        Raises:
            UserError: names what is as it was.
        """
        if self.plan.kind == "none" or trainer.state.global_step == self._first_step:
            return
        now = _fingerprints(trainer.model)
        untrained = {name for name in now if _must_change(name, now) and now[name] == self._start.get(name)}
        if self.plan.kind == "freeze" and len(untrained) < len(now):
            return  # a row that no token reaches, an expert that none is sent to: some must have moved
        if untrained:
            raise UserError(
                f"{len(untrained)} adapter tensors are as they were before training: {_some(untrained)}. {unmoved}"
            )


def _must_change(name: str, trained: Iterable[str]) -> bool:
    """Where a matrix B is zero at first, the first gradient of its A is zero; tokens may be absent from the data."""
    if "trainable_tokens" in name:
        return False
    other = name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")
    return other == name or other not in trained


def _at_begin(watch: Watch) -> Any:
    """A callback for when the trainer has loaded what it loads."""
    from transformers import TrainerCallback

    class AtBegin(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            watch.started(model, state.global_step)

    return AtBegin


def _fingerprints(model: Any) -> dict[str, str]:
    """Of each trained tensor; of a soft prompt, of what its network computes."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        from peft import get_peft_model_state_dict

        named: Iterable[tuple[str, Any]] = get_peft_model_state_dict(model, save_embedding_layers=False).items()
    else:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: _hash(tensor) for name, tensor in named}


def _hash(tensor: Any) -> str:
    import torch

    from ..parallel.whole import whole_tensor

    raw = whole_tensor(tensor).detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def _of_adapter(name: str) -> bool:
    return any(mark in name for mark in (".lora_", ".ia3_", "prompt_encoder.", ".modules_to_save.", ".token_adapter."))


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def use_lora_plus(trainer: Any, adapter: Any) -> None:
    """Give the trainer the optimiser of LoRA+ (Hayou et al. 2024, arXiv:2402.12354, sec. 4), where the recipe asks.

    Raises:
        UserError: a trainer that makes its optimiser otherwise.
    """
    ratio = getattr(adapter, "lora_plus_lr_ratio", None)
    if ratio is None:
        return
    from peft.optimizers import create_loraplus_optimizer

    if not hasattr(trainer, "get_optimizer_cls_and_kwargs"):
        raise UserError("adapter.lora_plus_lr_ratio: this objective's trainer makes its own optimiser: remove the key")

    own = trainer.create_optimizer

    def create_optimizer(model: Any = None) -> Any:
        if trainer.optimizer is None:
            arguments, trained = trainer.args, trainer.model if model is None else model
            cls, options = trainer.get_optimizer_cls_and_kwargs(arguments, trained)
            trainer.optimizer = create_loraplus_optimizer(
                trained,
                cls,
                loraplus_lr_ratio=float(ratio),
                loraplus_lr_embedding=adapter.lora_plus_lr_embedding or options["lr"],
                loraplus_weight_decay=arguments.weight_decay,
                **options,
            )
        return own(model)  # which leaves an optimiser as it is, but for what the trainer holds beside the model

    trainer.create_optimizer = create_optimizer


def check_weights(model: Any) -> None:
    """Raises:
    UserError: a weight is not a number; names it.
    """
    from ..parallel.whole import whole_tensor
    from ..parallel.zero import is_split

    for name, parameter in model.named_parameters():
        weight = whole_tensor(parameter) if is_split(parameter) else parameter
        if weight.is_floating_point() and not weight.detach().isfinite().all():
            raise UserError(
                f"{name} holds values that are not numbers: training has diverged. Lower train.learning_rate"
            )
