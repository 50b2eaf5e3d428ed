"""FLOPs of a training step, by torch's own formulas, extended to the whole model."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .fake_model import plain
from .memory import Step


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward and a backward pass over one batch: two for a multiplication with its addition.

    Attributes:
        tokens: of the batch, the encoder's included.
        forward, backward: of all matrix products; recomputed: of layers that are computed again for the backward pass.
        attention: those of all three that grow with the square of the length; the full square, as kernels compute it.
    """

    tokens: int
    forward: int
    backward: int
    recomputed: int
    attention: int

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recomputed

    @property
    def a_token(self) -> float:
        return self.total / self.tokens

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total, "a_token": self.a_token}


def flops_of(step: Step) -> Flops:
    """The FLOPs of a step that was tried."""
    setting = step.setting
    sums = {"the embeddings": 0, "the forward pass": 0, "the loss": 0, "the backward pass": 0}
    attention = 0
    for name, segment, _ in step.timeline():
        sums[name] += segment.flops
        attention += segment.pairs
    layers, head = sums["the forward pass"], sums["the loss"]
    recomputed = layers if setting.checkpointing == "layers" and sums["the backward pass"] else 0
    of_head = round(head / _passes_of_head(step))
    return Flops(
        tokens=setting.batch * (setting.length + setting.source),
        forward=sums["the embeddings"] + layers + of_head,
        backward=sums["the backward pass"] - recomputed + head - of_head,
        recomputed=recomputed,
        attention=attention,
    )


def _passes_of_head(step: Step) -> int:
    """How often the head multiplies: forward, for the gradient of what it reads, and of its weight."""
    model, trial = plain(step.trial.fake.model), step.trial
    head = getattr(model, "lm_head", None)
    trained = isinstance(head, nn.Linear) and head.weight.requires_grad
    return 1 + bool(trial.backward) + trained
