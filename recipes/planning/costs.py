"""All that a plan says, put together."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ...modeling.cache_sizes import predicted_size
from ..errors import UserError
from .fit import Fit, fit_of
from .flops import Flops, flops_of
from .memory import Memory, Step, step_of
from .optimum import Optimum, optimum_of
from .setting import Setting
from .step_setting import AskedOfStep, Device, setting_of
from .subject import Subject
from .units import BYTES

# Of what a device could do, the share that training reaches where nothing was measured: PaLM's 46 %, Llama 3's 38 to
# 43 % (arXiv:2204.02311, sec. 4.1; arXiv:2407.21783, table 4).
REACHED = 0.4
# Tokens of a forward pass on one device; beyond that the pieces of the loss alone take a minute to count.
MOST_TOKENS = 2**20


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        parts: of the model; tied ones count once.
        active: those that one token uses. trainable: that get gradients, an adapter's included.
        adapter: those beside the model.
        bytes: of the model's weights by type, and as the recipe stores them under "stored".
    """

    parts: dict[str, int]
    total: int
    active: int
    trainable: int
    adapter: int
    bytes: dict[str, int]


@dataclass(frozen=True)
class Cache:
    """What generation keeps: bytes for `rows` texts of `tokens` tokens, by the type of its values."""

    tokens: int
    rows: int
    bytes: dict[str, int]


@dataclass(frozen=True)
class Run:
    """A whole run.

    Attributes:
        tokens: read, without what pads them; steps: of the optimiser. None where the plan does not know.
        flops: of all of it. seconds: expected; rate: in words, what they rest on.
    """

    tokens: float | None = None
    steps: int | None = None
    flops: float | None = None
    seconds: float | None = None
    rate: str = ""


# Of a setting, in JSON.
_SHOWN = (
    *("head", "dtype", "mixed", "optimizer", "batch", "accumulation", "length", "source", "supervised"),
    *("padding", "checkpointing", "attention", "kernels", "gpus"),
)


@dataclass(frozen=True)
class Costs:
    """A plan.

    Attributes:
        memory: of the step as it is set; other_memory: with checkpointing where it is set without, and the reverse.
        fit: None where no size of a device was said.
        optimum: None where the law says nothing: for other objectives, and models that are trained already.
        remarks: what was assumed.
    """

    name: str
    setting: Setting
    parameters: Parameters
    flops: Flops
    memory: Memory
    other_memory: Memory
    cache: Cache | None
    run: Run
    optimum: Optimum | None = None
    fit: Fit | None = None
    device: Device = field(default_factory=Device)
    remarks: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain numbers, texts and lists."""
        step = {name: getattr(self.setting, name) for name in _SHOWN} | {"adapter": self.setting.adapter.kind}
        return {
            "name": self.name,
            "step": step | {"tokens": self.setting.tokens_a_step},
            "parameters": asdict(self.parameters),
            "flops": self.flops.as_dict(),
            "memory": self.memory.as_dict(),
            "memory_with_checkpointing": self.memory_with("layers").as_dict(),
            "memory_without_checkpointing": self.memory_with("none").as_dict(),
            "cache": None if self.cache is None else asdict(self.cache),
            "run": asdict(self.run),
            "optimum": None if self.optimum is None else self.optimum.as_dict(),
            "fit": None if self.fit is None else self.fit.as_dict(),
            "device": asdict(self.device),
            "remarks": list(self.remarks),
        }

    def memory_with(self, checkpointing: str) -> Memory:
        """Of the step with or without checkpointing."""
        return self.memory if self.setting.checkpointing == checkpointing else self.other_memory


@dataclass(frozen=True)
class Asked(AskedOfStep):
    """What the command line asks beside the recipe.

    Attributes:
        context: tokens of a text that is generated.
        tokens: of the whole run. throughput: tokens a second, over all devices. peak: FLOP/s of one device.
    """

    context: int | None = None
    tokens: float | None = None
    throughput: float | None = None
    peak: float | None = None


def costs_of(subject: Subject, device: Device, asked: Asked) -> Costs:
    """The plan of a subject.

    Raises:
        UserError: an adapter that the model cannot have, an optimiser that is not known, or a length beyond the model.
    """
    config = subject.config
    _check_length(config, asked, subject.recipe.adapter.virtual_tokens)
    setting, assumed = setting_of(subject, device, batch=asked.batch, length=asked.length)
    if setting.batch * setting.length > MOST_TOKENS:
        raise UserError(
            f"{setting.batch:,} rows of {setting.length:,} tokens: a forward pass of more than {MOST_TOKENS:,} tokens "
            "is not planned: give fewer rows with --batch, and more steps"
        )
    step = step_of(setting)
    other = "none" if setting.checkpointing == "layers" else "layers"
    flops, parameters = flops_of(step), parameters_of(step)
    run = run_of(subject, setting, flops, asked)
    by_law = setting.head == "causal_lm" and subject.recipe.objective.kind == "pretrain"
    return Costs(
        name=subject.name,
        setting=setting,
        parameters=parameters,
        flops=flops,
        memory=step.memory(),
        other_memory=step_of(setting.but(checkpointing=other)).memory(),
        cache=_cache(config, asked.context),
        run=run,
        optimum=optimum_of(parameters.active, run.tokens) if by_law else None,
        fit=None if device.memory is None else fit_of(subject, device, AskedOfStep(asked.batch, asked.length), step),
        device=device,
        remarks=(*subject.remarks, *assumed, *_beyond(config, asked.context)),
    )


def _check_length(config: Any, asked: Asked, virtual: int) -> None:
    longest = config.max_position_embeddings - virtual
    for name, length in (("--length", asked.length), ("--context", asked.context)):
        if length is not None and length > longest and config.position_embedding == "learned":
            raise UserError(f"{name} {length}: the model has learned positions for {longest} tokens: give at most that")
    if asked.context is not None and config.architecture == "encoder":
        raise UserError("--context: an encoder generates no text and keeps no cache: leave it out")


def _beyond(config: Any, context: int | None) -> tuple[str, ...]:
    """A remark where a text is longer than the model was made for."""
    longest = config.max_position_embeddings
    if context is None or context <= longest:
        return ()
    return (f"a text of {context:,} tokens, though the model was made for {longest:,}",)


def parameters_of(step: Step) -> Parameters:
    """The parameters of the whole model of a step that was tried."""
    setting, fake = step.setting, step.trial.fake
    counts = setting.config.counts(head=setting.head)
    trainable = total = 0.0
    for parameter in fake.model.parameters():
        number = parameter.numel() * fake.repeats(parameter)
        trainable += number if parameter.requires_grad else 0
        total += number
    whole = counts.total_parameters
    in_place = setting.adapter.in_place
    sizes = {name: whole * size for name, size in BYTES.items()}
    return Parameters(
        parts=counts.parameters,
        total=whole,
        active=counts.active_parameters,
        trainable=round(trainable),
        adapter=0 if in_place else round(_beside(step)),
        bytes=sizes | {"stored": step.memory().weights * setting.gpus},
    )


def _beside(step: Step) -> float:
    fake = step.trial.fake
    marks = ("lora_", "prompt_encoder", "ia3_")
    named = ((name, p) for name, p in fake.model.named_parameters() if any(mark in name for mark in marks))
    return sum(p.numel() * fake.repeats(p) for _, p in named)


def _cache(config: Any, context: int | None) -> Cache | None:
    if config.architecture == "encoder":
        return None
    tokens = context or config.max_position_embeddings
    source = tokens if config.architecture == "encoder-decoder" else 0
    sizes = {name: predicted_size(config, tokens, bytes_per_value=size, source=source) for name, size in BYTES.items()}
    # What a window or an encoder keeps stays in 16 bits.
    eight = predicted_size(config, tokens, quantized=True, bytes_per_value=2, source=source)
    return Cache(tokens, 1, sizes | {"int8": eight})


def run_of(subject: Subject, setting: Setting, flops: Flops, asked: Asked) -> Run:
    """Tokens, steps and time of the whole run, as far as they are known."""
    planned = (subject.metrics or {}).get("plan", {})
    limit = subject.recipe.train.get("max_steps") or -1
    tokens, steps = asked.tokens, None
    if tokens is not None:
        steps = math.ceil(tokens / setting.tokens_a_step)
    elif limit > 0:
        tokens, steps = float(limit * setting.tokens_a_step), limit
    if planned.get("tokens_seen") and asked.tokens is None:
        tokens, steps = float(planned["tokens_seen"]), planned["steps"]
    if tokens is None:
        return Run()
    work = flops.a_token * tokens
    measured = (subject.metrics or {}).get("training", {}).get("tokens_per_second")
    if asked.throughput is not None:
        seconds, rate = tokens / asked.throughput, f"{asked.throughput:,.0f} tokens a second, as stated"
    elif measured:
        seconds, rate = tokens / measured, f"{measured:,.0f} tokens a second, as measured in {subject.name}"
    elif asked.peak is not None:
        speed = asked.peak * REACHED * setting.gpus
        seconds = work / speed
        rate = f"{REACHED:.0%} of {asked.peak:.3g} FLOP/s on {setting.gpus} device{'s' * (setting.gpus > 1)}, assumed"
    else:
        return Run(tokens, steps, work)
    return Run(tokens, steps, work, seconds, rate)
