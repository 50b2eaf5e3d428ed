"""Routers of a mixture of experts under trainers that know nothing of them: their losses, and biases that move."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def router_logits_of(model: Any) -> Iterator[list[Any]]:
    """Let the model's body give its router logits, whoever calls it.

    Args:
        model: with a head, without the wrapper of an adapter.

    Yields:
        A list that gets those of each call, as `router_losses` of the model takes them.
    """
    seen: list[Any] = []
    body = model.base_model
    hooks = (
        body.register_forward_pre_hook(
            lambda module, given, named: (given, named | {"output_router_logits": True}), with_kwargs=True
        ),
        body.register_forward_hook(lambda module, given, output: seen.append(output.router_logits)),
    )
    try:
        yield seen
    finally:
        for hook in hooks:  # what stayed would hold the graph of every later call
            hook.remove()


def have_losses(config: Any) -> bool:
    """Whether the routers of such a model add something to the loss."""
    return bool(config.num_experts and (config.router_aux_loss_coef or config.router_z_loss_coef))


def move_router_biases(trainer: Any, model: Any) -> None:
    """Move the routers' choosing biases towards an even load after each step, where the config says so; see `moe`."""
    from transformers import TrainerCallback

    class MoveRouterBiases(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model.update_router_biases()

    if model.config.num_experts and model.config.router_bias_update_rate:
        trainer.add_callback(MoveRouterBiases())
