"""What the trainers of all objectives have in common."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..routers import have_losses, move_router_biases

if TYPE_CHECKING:
    from ..tokens.packing import TrainingRows


def built(trainer_class: Any, model: Any, arguments: Any, *, rows: "TrainingRows | None" = None, **options: Any) -> Any:
    """A seeded trainer with this suite's progress line; an adapter among the options is attached in it.

    Args:
        rows: what is trained on in place of the option `train_dataset`, which some trainers must see first.

    Raises:
        UserError: the trainer refuses the settings.
    """
    from transformers import set_seed
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from ..parallel.world import shard_on_cpus
    from ..progress import TrainingProgress
    from ..training import extended

    if arguments.eval_strategy == "no":
        options.pop("eval_dataset", None)
    set_seed(arguments.seed)
    shard_on_cpus(arguments)
    try:
        trainer = extended(trainer_class)(model=model, args=arguments, **options)
    except (ValueError, TypeError, ImportError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise UserError(f"train: the trainer refuses these settings: {error}") from error
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(TrainingProgress)
    if rows is not None:
        trainer.train_dataset = rows
        at_each_epoch(trainer, rows.set_epoch)
    return trainer


def at_each_epoch(trainer: Any, begin: "Callable[[int], Any]") -> None:
    """Call with the number of each epoch when it begins, also of the one that a resumed run goes on with."""
    from transformers import TrainerCallback

    class AtEachEpoch(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begin(int(state.epoch or 0))

    trainer.add_callback(AtEachEpoch())


def library_trainer(trainer_class: Any, model: Any, arguments: Any, *, adapter: Any, **options: Any) -> Any:
    """A trainer of transformers, which leaves the adapter and the routers' biases to others.

    Args:
        adapter: PEFT config to attach, or None.
        options: as of `built`.

    Raises:
        UserError: adapter or settings that cannot be used.
    """
    from transformers import set_seed

    from ..adapters import attach

    trained = model
    if adapter is not None:
        set_seed(arguments.seed)  # an adapter starts from random numbers
        trained = attach(model, adapter)
    if hasattr(trained, "peft_config") and arguments.activation_checkpointing:
        trained.enable_input_require_grads()  # nothing else would before the first adapted layer
    trainer = built(trainer_class, trained, arguments, **options)
    move_router_biases(trainer, model)
    return trainer


def check_smoothing(arguments: Any, config: Any) -> None:
    """Raises:
    UserError: labels would be smoothed by the trainer of transformers, which leaves the routers out of the loss.
    """
    if arguments.label_smoothing_factor and config.num_experts:
        raise UserError(
            "train.label_smoothing_factor: the trainer takes the smoothed loss from the logits alone, so the routers' "
            "own losses would be lost: remove it for a mixture of experts"
        )


# Figures of which less is better; the trainer knows it of those that end in "loss".
LESS_IS_BETTER = ("loss", "mean_absolute_error", "character_error_rate", "word_error_rate")


def check_best_metric(train: dict[str, Any], arguments: Any, names: Sequence[str]) -> None:
    """Let the trainer choose the best checkpoint in the right direction.

    Args:
        train: the recipe's section.
        names: of the figures that the trainer's evaluation gives.

    Raises:
        UserError: `metric_for_best_model` is none of them; the trainer would find out at its first evaluation.
    """
    if arguments.metric_for_best_model is None:
        return
    name = arguments.metric_for_best_model.removeprefix("eval_")
    if name not in ("loss", *names):
        known = dict.fromkeys(("loss", *names))
        raise UserError(f"train.metric_for_best_model: {name!r} is not measured in training; known: {', '.join(known)}")
    if train.get("greater_is_better") is None:
        arguments.greater_is_better = name not in LESS_IS_BETTER


def take_over(trainer: Any, checkpoint: Path) -> Any:
    """What the trainer would return after the checkpoint's step, which was the last one; it now has that model.

    Resumed there, the trainer would make one more step where `max_steps` ends within an epoch.
    """
    from transformers.trainer_callback import TrainerState
    from transformers.trainer_utils import TrainOutput

    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if (meter := getattr(trainer, "meter", None)) is not None:
        meter.take_over(trainer.state)
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    mean = sum(losses) / len(losses) if losses else 0.0
    return TrainOutput(trainer.state.global_step, mean, {"train_loss": mean})


def train_routers(trainer: Any, model: Any) -> None:
    """Let a mixture of experts train as its config says, where the trainer has a forward of its own.

    TRL's forward knows the load-balancing loss of a softmax router alone; the model answers for all kinds.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if have_losses(model.config):
        fused = model.forward

        @functools.wraps(fused)  # `generate` reads the signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            seen: list[Any] = []
            # Only for this call: what stayed would hold the graph of every later one.
            hook = model.base_model.register_forward_hook(lambda body, given, output: seen.append(output.router_logits))
            try:
                outputs = fused(*args, **kwargs)
            finally:
                hook.remove()
            if seen and seen[-1] is not None:
                outputs["aux_loss"] = model.router_losses(seen[-1], [kwargs.get("attention_mask")])[0]
            return outputs

        model.forward = forward
        # What comes back is weighted already.
        trainer.aux_loss_enabled, trainer.router_aux_loss_coef = True, 1.0
    move_router_biases(trainer, model)
