"""What the trainers of all objectives have in common."""

from typing import Any

from ..errors import UserError


def built(trainer_class: Any, model: Any, arguments: Any, *, eval_dataset: Any, **options: Any) -> Any:
    """A seeded trainer with this suite's progress line; an adapter among the options is attached in it.

    Raises:
        UserError: the trainer refuses the settings.
    """
    from transformers import set_seed
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from ..progress import TrainingProgress

    set_seed(arguments.seed)
    try:
        trainer = trainer_class(
            model=model,
            args=arguments,
            eval_dataset=eval_dataset if arguments.eval_strategy != "no" else None,
            **options,
        )
    except (ValueError, TypeError, ImportError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise UserError(f"train: the trainer refuses these settings: {error}") from error
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(TrainingProgress)
    return trainer


def train_routers(trainer: Any, model: Any) -> None:
    """Let a mixture of experts train as its config says.

    The trainer's own forward knows the load-balancing loss of a softmax router alone; the model answers for all kinds.
    """
    from transformers import TrainerCallback

    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = model.config
    if config.router_aux_loss_coef or config.router_z_loss_coef:
        fused = model.forward

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

    class MoveRouterBiases(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model.update_router_biases()

    if config.router_bias_update_rate:
        trainer.add_callback(MoveRouterBiases())
