"""Whether a policy starts at its reference: a check before the first update, of which the run keeps no trace."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import UserError
from .flight_checks import PASSED

# What a step leaves in trainers of policies.
_TRACES = (
    *("_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "_step", "_buffered_inputs", "_columns"),
    *("_current_train_step_time", "current_gradient_accumulation_steps", "kl", "state"),
)


@contextmanager
def without_trace(trainer: Any) -> Iterator[None]:
    """Trainer, model and random numbers are afterwards as they were."""
    import torch

    model = trainer.model
    kept = {name: copy.deepcopy(getattr(trainer, name)) for name in _TRACES if hasattr(trainer, name)}
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    state = random.getstate()
    try:
        with torch.random.fork_rng(), torch.no_grad():
            yield
    finally:
        random.setstate(state)
        for name, value in kept.items():
            setattr(trainer, name, value)
        for module, mode in modes:
            module.training = mode
        for buffer, value in buffers:
            buffer.copy_(value)


def sampled_divergence(trainer: Any) -> float:
    """The mean divergence from the reference over the first batch's answers, as TRL's trainers of policies log it.

    In training mode, so that dropout shows.
    """
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    with trainer.accelerator.autocast():
        trainer.compute_loss(trainer.model, inputs)
    return trainer._metrics["train"]["kl"][-1]


def rollout_divergence(trainer: Any) -> float:
    """The same over the first batch of PPO's rollout."""
    trainer.rollout(next(iter(trainer.get_train_dataloader())))
    return trainer._metrics["kl"][-1]


def require_start(divergence: float) -> str:
    """Both are the same forward pass, so that not even rounding parts them.

    Raises:
        UserError: the policy does not start at its reference.
    """
    if divergence != 0:
        raise UserError(
            f"the policy is not its own reference before the first update: on the first batch the KL divergence is "
            f"{divergence:.2e} instead of 0. Dropout must be off, and an adapter must leave the model as it is at its "
            "start: with LoRA set adapter.init_lora_weights to true or gaussian"
        )
    return PASSED
