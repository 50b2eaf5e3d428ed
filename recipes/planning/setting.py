"""What memory and FLOPs of a training step depend on."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..schema.adapters import AdapterSection, NoAdapter
from ..schema.sections import Quantization


@dataclass(frozen=True)
class Setting:
    """One training step on one device.

    Attributes:
        config: an `AnyformerConfig`.
        head: key of `modeling.HEADS`; task_type: PEFT's name for it.
        dtype: of the weights, by name.
        mixed: what products are computed in under autocast; "no": in the type of the weights.
        adapter, quantization: sections of a recipe.
        loss: what a step computes: "model": the model's own loss; "log_probs": those of answers, by TRL's fused head;
            "logits": likelihood of the first half of the rows and log-probabilities of all; "answers": those alone.
        optimizer: as `train.optim` names it.
        batch: rows of a forward pass; rows_of_one: those that belong together, as two answers; accumulation: passes of
            a step.
        length: tokens of a row; source: of the encoder's, where there is one.
        supervised: share of the tokens that have a label.
        padding: whether rows are of unequal length, or packed, so that attention needs a mask.
        checkpointing: "layers": each layer is computed again in the backward pass.
        attention: the attention function.
        kernels: whose rules choose the attention kernel.
        gpus: devices that weights, gradients and optimiser state are split over (FSDP2, ZeRO-3).
    """

    config: Any
    head: str = "causal_lm"
    task_type: str = "CAUSAL_LM"
    dtype: str = "float32"
    mixed: Literal["no", "bfloat16", "float16"] = "no"
    adapter: AdapterSection = field(default_factory=NoAdapter)
    quantization: Quantization | None = None
    loss: Literal["model", "log_probs", "logits", "answers"] = "model"
    optimizer: str = "adamw_torch_fused"
    batch: int = 8
    rows_of_one: int = 1
    accumulation: int = 1
    length: int = 1024
    source: int = 0
    supervised: float = 1.0
    padding: Literal["none", "some"] = "none"
    checkpointing: Literal["none", "layers"] = "none"
    attention: str = "sdpa"
    kernels: Literal["cpu", "gpu"] = "cpu"
    gpus: int = 1

    def but(self, **changes: Any) -> "Setting":
        """The same with some things otherwise."""
        return replace(self, **changes)

    @property
    def tokens_a_step(self) -> int:
        """Of an optimiser step over all devices, the encoder's included."""
        return self.batch * self.accumulation * self.gpus * (self.length + self.source)
