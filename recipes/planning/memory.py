"""Bytes of a training step, extended from the layers that were tried to the whole model."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from ...modeling.counting import part_of
from .setting import Setting
from .trial import Segment, Trial, try_step
from .units import BYTES


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
        weights: with quantised ones as they are stored, and what is not trained beside them.
        gradients, optimizer: of what is trained.
        activations: kept for the backward pass when the last layer is done.
        loss: the most that the head and the loss take beside them, gradients of the head included.
        gathered: of split weights, those that are whole for a moment.
        peak: the most at any moment of a step; at: which moment.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    gathered: int
    peak: int
    at: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Step:
    """What a step was found to need.

    Attributes:
        setting: what was asked for; tried: what was tried for it.
        trial: its segments; more: those of a model with one more layer, where the loss grows with their number.
    """

    setting: Setting
    tried: Setting
    trial: Trial
    more: Trial | None

    def timeline(self) -> Iterator[tuple[str, Segment, int]]:
        """The segments of the whole model in their order, each with its name and the bytes of gradients it leaves."""
        return _timeline(self.trial, self.more)

    def memory(self) -> Memory:
        return _extended(self)


def step_of(setting: Setting) -> Step:
    """Try a setting.

    Raises:
        UserError: an adapter that the model cannot have, or an optimiser that is not known.
    """
    tried = setting
    if setting.gpus > 1 and setting.mixed != "no":
        # Weights are gathered in the type of the products, so that autocast makes no copies of its own.
        tried = setting.but(dtype=setting.mixed, mixed="no")
    return Step(setting, tried, try_step(tried), try_step(tried, extra=1) if _loss_grows(setting) else None)


def _loss_grows(setting: Setting) -> bool:
    """Whether the loss reads something of each layer, as router losses do."""
    config = setting.config
    return bool(config.num_experts and (config.router_aux_loss_coef or config.router_z_loss_coef))


def _extended(step: Step) -> Memory:
    trial, setting, tried = step.trial, step.setting, step.tried
    fake, gpus = trial.fake, setting.gpus
    wide = BYTES[setting.dtype] / BYTES[tried.dtype]  # of a stored weight over that of a gathered one
    tensors = {id(t): t for t in (*fake.model.parameters(), *fake.model.buffers())}
    stored = {key: t.untyped_storage().nbytes() * _scale(t, wide) for key, t in tensors.items()}
    trained = {key for key, t in tensors.items() if t.requires_grad and t.grad is not None}
    times = {key: fake.repeats(t) for key, t in tensors.items()}
    weights = sum(times[key] * size for key, size in stored.items()) / gpus
    gradients = sum(times[key] * stored[key] for key in trained) / gpus
    state = sum(times.get(key, 1) * size * wide for key, size in trial.state.items()) / gpus
    before = setting.accumulation > 1
    base = weights + state + (gradients if before else 0)
    level = peak = base
    at, kept, gathered = "the start", base, _gathered(trial) if gpus > 1 else 0
    loss = 0
    for name, segment, grads in step.timeline():
        highest = level + segment.peak + gathered
        if name == "the loss":
            loss, kept = max(segment.peak, 0), level
        if highest > peak:
            peak, at = highest, name
        # Of split weights a gradient is whole until it is shared out.
        level += segment.delta - (grads * (1 - wide / gpus) if gpus > 1 and not before else 0)
        if gpus > 1 and before:
            level = max(level, base)
    trial_update = level + trial.update.peak / (1 if gpus == 1 else gpus)
    if trial_update > peak:
        peak, at = trial_update, "the update"
    return Memory(
        weights=round(weights),
        gradients=round(gradients),
        optimizer=round(state),
        activations=round(kept - base),
        loss=round(loss),
        gathered=round(gathered),
        peak=round(peak),
        at=at,
    )


def _scale(tensor: Any, wide: float) -> float:
    return wide if tensor.is_floating_point() else 1.0


def _timeline(trial: Trial, more: Trial | None) -> Iterator[tuple[str, Segment, int]]:
    """The segments of a step of the whole model in their order, each with its name and the gradients it leaves."""
    slots = trial.fake.slots
    yield "the embeddings", trial.before, 0
    for number, kept in enumerate(slots):
        for slot in kept:
            yield "the forward pass", trial.forward[number, slot], 0
    yield "the loss", _loss_segment(trial, more), _grads_outside(trial, embeddings=False)
    for number, kept in reversed(list(enumerate(slots))):
        for slot in reversed(kept):
            if (number, slot) in trial.backward:
                yield "the backward pass", trial.backward[number, slot], _grads(trial, number, slot)


def _loss_segment(trial: Trial, more: Trial | None) -> Segment:
    if more is None:
        return trial.loss
    here, longer = (sum(len(stack.layers) for stack in each.fake.stacks) for each in (trial, more))
    there = sum(len(kept) for kept in trial.fake.slots)
    if longer == here:
        return trial.loss
    layers = (there - here) / (longer - here)
    pairs = zip(astuple(trial.loss), astuple(more.loss), strict=True)
    return Segment(*(round(here + (longer - here) * layers) for here, longer in pairs))


def _grads(trial: Trial, number: int, slot: int) -> int:
    layer = trial.fake.stacks[number].layers[slot]
    first = number == slot == 0  # behind the first layer come the embeddings
    return _grad_bytes(layer.parameters()) + (_grads_outside(trial, embeddings=True) if first else 0)


def _grads_outside(trial: Trial, *, embeddings: bool) -> int:
    """Of what stands outside the layers: the embeddings, or what comes behind the layers."""
    inside = {id(p) for stack in trial.fake.stacks for layer in stack.layers for p in layer.parameters()}
    named = ((name, p) for name, p in trial.fake.model.named_parameters() if id(p) not in inside)
    return _grad_bytes(p for name, p in named if (part_of(name) == "embeddings") == embeddings)


def _grad_bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(_bytes(p.grad) for p in parameters if p.grad is not None)


def _gathered(trial: Trial) -> int:
    """Weights that are whole at a time: those outside the layers, a layer that computes and the next one."""
    layers = [layer for stack in trial.fake.stacks for layer in stack.layers]
    sizes = [sum(_bytes(p) for p in layer.parameters()) for layer in layers]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    root = sum(_bytes(p) for p in trial.fake.model.parameters() if id(p) not in inside)
    return root + 2 * max(sizes)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
