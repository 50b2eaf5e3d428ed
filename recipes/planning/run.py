"""What a run will do, said before its first step.

Unlike `costs`, it knows the run's data and takes no time: memory is counted, no step is gone through.
"""

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import rows_a_step
from .optimizers import bytes_a_value
from .units import BYTES, count, gigabytes

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ...modeling import AnyformerConfig
    from ..adapters import AdapterPlan
    from ..tokens.report import TokenizationReport


@dataclass(frozen=True)
class Plan:
    """The size of a run.

    Attributes:
        parameters: by part, as the config counts them.
        trainable: parameters that receive gradients.
        memory: bytes of weights, gradients, optimiser state and models held beside; activations come on top.
        steps: optimiser updates.
        rows, tokens, supervised_tokens: of one epoch.
        sequences: what a batch is counted in, of one epoch: rows, or packed rows.
        tokens_seen: over the whole run.
        training_flops: forward and backward over the whole run; a frozen base spares the gradients of its weights.
        passes: forward passes that cost as much as a step: one forward, one for the gradients by what layers read, one
            for those by weights unless the base is frozen, and those beside the model that is learned.
    """

    parameters: dict[str, int]
    trainable: int
    memory: dict[str, int]
    steps: int
    rows: int
    tokens: int
    supervised_tokens: int
    sequences: int
    tokens_seen: int
    training_flops: int
    passes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    config: "AnyformerConfig",
    dtype: str,
    adapter: "AdapterPlan",
    arguments: "TrainingArguments",
    tokens: "TokenizationReport",
    *,
    sequences: int,
    head: str,
    weights: int,
    beside: dict[str, int] | None = None,
    passes: int = 0,
    flops_a_token: int = 0,
) -> Plan:
    """The plan of a run from what is known before any weight is loaded.

    Args:
        dtype: of the weights, by name; adapters train in fp32 beside them.
        adapter: what is trained.
        sequences: what a batch is counted in, of one epoch: rows, or packed blocks of them.
        head: key of `modeling.HEADS`.
        weights: bytes of the model's own weights, quantised or not.
        beside: parameters of untrained models that are held beside it, by what they are.
        passes: forward passes of a step beyond the one that is learned from.
        flops_a_token: of a step, for what is trained beside the model.
    """
    trainable = adapter.trainable
    rows = tokens.rows_kept
    batch = rows_a_step(arguments)
    an_epoch = math.ceil(sequences / batch)
    steps = arguments.max_steps if arguments.max_steps > 0 else math.ceil(an_epoch * arguments.num_train_epochs)
    seen = round(tokens.tokens * steps / an_epoch)
    sides = 2 if config.architecture == "encoder-decoder" else 1  # the tokens of a row stand on both sides of one
    counts = config.counts(sequence_length=max(tokens.tokens // rows // sides, 1), head=head)
    total = counts.total_parameters
    full = adapter.in_place and trainable >= total
    trained_in = getattr(torch, dtype) if adapter.in_place and dtype in BYTES else torch.float32
    size = trained_in.itemsize
    forward = counts.forward_flops * seen // max(tokens.tokens // rows, 1)
    passes += 3 if full else 2
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    return Plan(
        parameters=counts.parameters,
        trainable=trainable,
        memory={
            "weights": weights + (0 if adapter.in_place else trainable * size),
            "gradients": trainable * size,
            "optimizer": round(trainable * bytes_a_value(optimizer, trained_in)),
        }
        | {name: parameters * BYTES.get(dtype, 4) for name, parameters in (beside or {}).items()},
        steps=steps,
        rows=rows,
        tokens=tokens.tokens,
        supervised_tokens=tokens.supervised_tokens,
        sequences=sequences,
        tokens_seen=seen,
        training_flops=forward * passes + flops_a_token * seen,
        passes=passes,
    )


def describe(plan: Plan) -> list[tuple[str, str]]:
    """The plan as (name, value) lines for a table."""
    total = sum(plan.parameters.values())
    parts = ", ".join(f"{name} {count(value)}" for name, value in plan.parameters.items() if value)
    memory = ", ".join(f"{name} {gigabytes(value)}" for name, value in plan.memory.items())
    supervised = f"{plan.supervised_tokens / plan.tokens:.1%} of them supervised"
    packed = f" packed into {plan.sequences:,}" if plan.sequences < plan.rows else ""
    if not plan.supervised_tokens:
        supervised = "to which the model's own answers come"
    return [
        ("parameters", f"{count(total)} ({parts})"),
        ("trainable", f"{count(plan.trainable)} ({plan.trainable / total:.2%} of the model)"),
        ("memory", f"{gigabytes(sum(plan.memory.values()))} ({memory}) and activations"),
        ("data", f"{plan.rows:,} rows{packed}, {plan.tokens:,} tokens, {supervised}"),
        ("run", f"{plan.steps:,} steps over {plan.tokens_seen:,} tokens, about {plan.training_flops:.1e} FLOPs"),
    ]
