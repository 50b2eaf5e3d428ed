"""What would make a step fit into a device, the cheapest first."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import UserError
from ..schema.recipe import adapter_model
from ..schema.sections import Quantization
from .memory import Step, step_of
from .setting import Setting
from .units import gigabytes

# Of a device's memory: what the library and its kernels take for themselves, and what an allocator cannot join.
MARGIN = 0.06
_MOST_DEVICES = 65536
Apply = Callable[[Setting], Setting | None]


@dataclass(frozen=True)
class Change:
    """A change of a setting.

    Attributes:
        name: in words; override: as the command line takes it.
        cost: what it costs, in words.
        apply: the changed setting; None where there is nothing to change.
        frozen: most weights are no longer trained, which is another training.
    """

    name: str
    override: str
    cost: str
    apply: Apply
    frozen: bool = False


@dataclass(frozen=True)
class Proposal:
    """Changes and what they lead to.

    Attributes:
        changes: in words; overrides: for the command line; costs: what each costs.
        peak: bytes of one device.
    """

    changes: tuple[str, ...]
    overrides: tuple[str, ...]
    costs: tuple[str, ...]
    peak: int
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Fit:
    """Whether a step fits.

    Attributes:
        usable: bytes of a device without the margin.
        single: one change each, the cheapest first.
        combined: where no single one is enough: the cheapest that are, together.
    """

    fits: bool
    peak: int
    usable: int
    single: tuple[Proposal, ...] = ()
    combined: tuple[Proposal, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_of(step: Step, memory: int) -> Fit:
    """Whether a step fits into devices of `memory` bytes, and else what would make it fit."""
    usable, peak = round(memory * (1 - MARGIN)), step.memory().peak
    if peak <= usable:
        return Fit(True, peak, usable)
    tried = _Tried(step, usable)
    single = [found for change in CHANGES if (found := tried.proposal([change])) is not None]
    more = tried.devices([])
    single += [more] if more is not None else []
    combined: list[Proposal] = []
    if not any(found.fits for found in single):
        whole = [change for change in CHANGES if not change.frozen]
        mild = [change for change in whole if change not in _DRASTIC]
        found = tried.least(mild) or tried.least(whole)
        combined = [found] if found is not None else []
        for change in (change for change in CHANGES if change.frozen):
            if (found := tried.least([*mild, change], needed=[change])) is not None:
                combined.append(found)
                break
        if (found := tried.devices(_SAME)) is not None:
            combined.append(found)
    return Fit(False, peak, usable, tuple(single), tuple(combined))


class _Tried:
    """Settings that were tried, each once."""

    def __init__(self, step: Step, usable: int) -> None:
        self.setting, self.usable = step.setting, usable
        self.peaks: dict[tuple[str, ...], int | None] = {(): step.memory().peak}

    def peak(self, changes: Sequence[Change]) -> int | None:
        """None where a change has nothing to change, or the model cannot have it."""
        key = tuple(sorted(change.name for change in changes))
        if key not in self.peaks:
            self.peaks[key] = None
            try:
                if (setting := _changed(self.setting, changes)) is not None:
                    self.peaks[key] = step_of(setting).memory().peak
            except UserError:  # an adapter that such a model cannot have
                pass
        return self.peaks[key]

    def proposal(self, changes: Sequence[Change]) -> Proposal | None:
        peak = self.peak(changes)
        if peak is None:
            return None
        return _proposed(changes, peak, peak <= self.usable)

    def least(self, changes: Sequence[Change], needed: Sequence[Change] = ()) -> Proposal | None:
        """The changes without the dearest that are not needed; None where all of them do not make it fit."""
        taken: list[Change] = list(needed)
        for change in changes:
            if change not in taken and self._applies([*taken, change]):
                taken.append(change)
        if not self._fits(taken):
            return None
        for change in reversed([change for change in taken if change not in needed]):
            fewer = [one for one in taken if one is not change]
            if fewer and self._fits(fewer):
                taken = fewer
        return self.proposal([change for change in CHANGES if change in taken])

    def _applies(self, changes: Sequence[Change]) -> bool:
        return _changed(self.setting, changes) is not None

    def _fits(self, changes: Sequence[Change]) -> bool:
        peak = self.peak(changes)
        return peak is not None and peak <= self.usable

    def devices(self, changes: Sequence[Change]) -> Proposal | None:
        """The least number of devices, doubled each time, that is enough, with as many of the changes as apply."""
        setting = self.setting
        taken: list[Change] = []
        for change in changes:
            changed = change.apply(setting)
            if changed is not None:
                setting, taken = changed, [*taken, change]
        step = step_of(setting.but(gpus=2 * max(setting.gpus, 1)))
        while step.setting.gpus <= _MOST_DEVICES:
            peak, count = step.memory().peak, step.setting.gpus
            if peak <= self.usable:
                more = Change(f"{count} devices", f"--gpus {count}", "devices; weights are sent to and fro", _same)
                return _proposed([*taken, more], peak, True)
            step = Step(step.setting.but(gpus=2 * count), step.tried, step.trial, step.more)
        return None


def _proposed(changes: Sequence[Change], peak: int, fits: bool) -> Proposal:
    names, overrides, costs = (
        tuple(getattr(change, field) for change in changes) for field in ("name", "override", "cost")
    )
    return Proposal(names, overrides, costs, peak, fits)


def _same(setting: Setting) -> Setting:
    return setting


def _changed(setting: Setting, changes: Sequence[Change]) -> Setting | None:
    for change in changes:
        changed = change.apply(setting)
        if changed is None:
            return None
        setting = changed
    return setting


def _with_config(setting: Setting, **fields: Any) -> Setting:
    config = copy.deepcopy(setting.config)
    for name, value in fields.items():
        setattr(config, name, value)
    return setting.but(config=config)


def _chunked(setting: Setting) -> Setting | None:
    size = setting.config.loss_chunk_size
    return _with_config(setting, loss_chunk_size=1024) if size == 0 or size > 1024 else None


def _fused(setting: Setting) -> Setting | None:
    config = setting.config
    able = not config.attention_sinks and config.attn_logit_softcapping is None
    return setting.but(attention="sdpa") if setting.attention == "eager" and able else None


def _mixed(setting: Setting) -> Setting | None:
    return setting.but(mixed="bfloat16") if setting.mixed == "no" and setting.dtype == "float32" else None


def _one_row(setting: Setting) -> Setting | None:
    if setting.batch == 1:
        return None
    return setting.but(batch=1, accumulation=setting.accumulation * setting.batch)


def _checkpointed(setting: Setting) -> Setting | None:
    return setting.but(checkpointing="layers") if setting.checkpointing == "none" else None


def _eight_bits(setting: Setting) -> Setting | None:
    return setting.but(optimizer="adamw_bnb_8bit") if setting.optimizer.startswith("adamw_torch") else None


def _narrow(setting: Setting) -> Setting | None:
    trained = setting.adapter.kind == "none" and setting.dtype == "float32"
    return setting.but(dtype="bfloat16", mixed="no") if trained else None


def _lora(setting: Setting) -> Setting | None:
    if setting.adapter.kind != "none":
        return None
    adapter: Any = adapter_model("lora").model_validate({"kind": "lora", "r": 16, "lora_alpha": 32})
    return setting.but(adapter=adapter, dtype="bfloat16", mixed="bfloat16")


def _qlora(setting: Setting) -> Setting | None:
    if setting.quantization is not None or setting.adapter.kind not in ("none", "lora"):
        return None
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    packed = Quantization.model_validate(options | {"bnb_4bit_compute_dtype": "bfloat16"})
    adapted = setting if setting.adapter.kind == "lora" else _lora(setting)
    return None if adapted is None else adapted.but(quantization=packed, dtype="bfloat16", mixed="bfloat16")


def _all() -> Iterator[Change]:
    yield Change("loss in chunks", "model.config.loss_chunk_size=1024", "nothing", _chunked)
    yield Change("attention without its scores", "model.attn_implementation=sdpa", "nothing", _fused)
    yield Change("products in bf16", "train.bf16=true", "nothing: masters stay in fp32", _mixed)
    yield Change(
        "one row at a time",
        "train.per_device_train_batch_size=1",
        "little: as many rows a step by train.gradient_accumulation_steps",
        _one_row,
    )
    yield Change(
        "checkpointing", "train.gradient_checkpointing=true", "a second forward pass: about a third", _checkpointed
    )
    yield Change("8-bit optimiser", "train.optim=adamw_bnb_8bit", "coarser averages of gradients", _eight_bits)
    yield Change("weights in bf16", "model.dtype=bfloat16", "small updates round away", _narrow)
    yield Change("LoRA", "adapter.kind=lora adapter.r=16 model.dtype=bfloat16", "trains little beside", _lora, True)
    yield Change(
        "QLoRA",
        "adapter.kind=lora model.quantization.load_in_4bit=true model.quantization.bnb_4bit_quant_type=nf4 "
        "model.quantization.bnb_4bit_use_double_quant=true model.quantization.bnb_4bit_compute_dtype=bfloat16 "
        "model.dtype=bfloat16",
        "the base is rounded to 4 bits, and unpacked at each product",
        _qlora,
        True,
    )


CHANGES = tuple(_all())
# Taken only where milder ones are not enough.
_DRASTIC = [change for change in CHANGES if change.name == "weights in bf16"]
# The same training in less memory: beside more devices nothing else is needed.
_SAME = [change for change in CHANGES if change.cost.startswith(("nothing", "little", "a second"))]


def verdict(fit: Fit, memory: int) -> str:
    """In one line."""
    beyond = fit.peak - fit.usable
    of = f"{gigabytes(fit.peak)} of {gigabytes(fit.usable)} usable ({gigabytes(memory)} less {MARGIN:.0%})"
    return f"fits: {of}" if fit.fits else f"does not fit: {of}, {gigabytes(beyond)} too much"
