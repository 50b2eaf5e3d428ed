"""What would make a step fit into a device, the cheapest first.

Each change is the words that are typed behind `anyformer plan`, and is planned by reading these: what is proposed is
what a plan with them finds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..errors import UserError
from ..schema.sections import GLOBAL_BATCH
from .memory import Step, step_of
from .setting import Setting
from .step_setting import AskedOfStep, Device, setting_of
from .subject import Subject
from .units import gigabytes

# Of a device's memory: what the library and its kernels take for themselves, and what an allocator cannot join.
MARGIN = 0.06
_MOST_DEVICES = 65536
_LEAST_GAIN = 0.98
_SHORTEST = 256  # tokens of a row
Words = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A change of a setting.

    Attributes:
        name: in words; cost: what it costs, in words.
        words: for the command line; None where there is nothing to change.
        training: what becomes of it: the "same"; "coarser"; "drastic", taken only where milder ones are not enough;
            "frozen", where most weights are no longer trained, which is another training.
    """

    name: str
    cost: str
    words: Callable[["Plans", Setting], Words | None]
    training: Literal["same", "coarser", "drastic", "frozen"]


@dataclass(frozen=True)
class Option:
    """An option of the command line that is given behind changes; `name` and `cost` as of a change."""

    words: str
    name: str
    cost: str


@dataclass(frozen=True)
class Proposal:
    """Changes and what they lead to.

    Attributes:
        changes: in words; overrides: for the command line; costs: what each costs.
        peak: bytes of one device.
    """

    changes: Words
    overrides: Words
    costs: Words
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
        combined: several together that are enough: with the same weights trained on as many devices, with an adapter,
            on more devices. Where nothing tried is enough, the one that comes nearest.
    """

    fits: bool
    peak: int
    usable: int
    single: tuple[Proposal, ...] = ()
    combined: tuple[Proposal, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Plans:
    """Steps of a subject under words of the command line, each planned once.

    Args:
        step: without any; usable: bytes of a device.
    """

    def __init__(self, subject: Subject, device: Device, asked: AskedOfStep, step: Step, usable: int) -> None:
        self.subject, self.device, self.asked, self.usable = subject, device, asked, usable
        self._steps: dict[Words, Step | None] = {(): step}
        self._subjects: dict[Words, Subject] = {}

    def step(self, words: Words) -> Step | None:
        """None where the recipe or the model cannot have it."""
        if words not in self._steps:
            try:
                setting = self._setting(words)
                self._steps[words] = self._on_more_devices(words, setting) or step_of(setting)
            except UserError:
                self._steps[words] = None
        return self._steps[words]

    def _setting(self, words: Words) -> Setting:
        options = dict(word.removeprefix("--").split(" ") for word in words if word.startswith("--"))
        overrides = tuple(one for word in words if not word.startswith("--") for one in word.split(" "))
        if overrides not in self._subjects:
            self._subjects[overrides] = self.subject.changed(overrides)
        device = replace(self.device, count=int(options.get("gpus", self.device.count)))
        asked = {name: int(options[name]) if name in options else given for name, given in asdict(self.asked).items()}
        return setting_of(self._subjects[overrides], device, **asked)[0]

    def _on_more_devices(self, words: Words, setting: Setting) -> Step | None:
        """The step on half as many, where only their number differs: what was tried there holds here."""
        fewer = (*words[:-1], _devices(setting.gpus // 2).words)
        last = words[-1] if words else None
        known = self._steps.get(fewer) if last == _devices(setting.gpus).words and setting.gpus > 2 else None
        if known is None or (known.setting.batch, known.setting.accumulation) != (setting.batch, setting.accumulation):
            return None
        return replace(known, setting=setting)

    def words(self, changes: Sequence[Change]) -> Words | None:
        """Of all changes, one after another; None where one has nothing to change."""
        words: Words = ()
        for change in changes:
            step = self.step(words)
            more = None if step is None else change.words(self, step.setting)
            if more is None:
                return None
            words += more
        return words

    def proposal(self, changes: Sequence[Change], *more: Option) -> Proposal | None:
        """None where one of the changes cannot be made."""
        words = self.words(changes)
        if words is None:
            return None
        words += tuple(option.words for option in more)
        step = self.step(words)
        if step is None:
            return None
        every: tuple[Change | Option, ...] = (*changes, *more)
        names, costs = tuple(one.name for one in every), tuple(one.cost for one in every)
        peak = step.memory().peak
        return Proposal(names, words, costs, peak, peak <= self.usable)

    def applicable(self, changes: Sequence[Change]) -> list[Change]:
        """Those that can be made one after another."""
        taken: list[Change] = []
        for change in changes:
            words = self.words([*taken, change])
            if words is not None and self.step(words) is not None:
                taken.append(change)
        return taken

    def least(self, changes: Sequence[Change], *more: Option, needed: Sequence[Change] = ()) -> Proposal | None:
        """The changes without the dearest that are not needed; None where all of them are not enough."""
        taken = self.applicable([change for change in CHANGES if change in changes or change in needed])
        found = self.proposal(taken, *more)
        if found is None or not found.fits or not set(needed) <= set(taken):
            return None
        for change in reversed([change for change in taken if change not in needed]):
            fewer = [one for one in taken if one is not change]
            if (fewer or more) and (less := self.proposal(fewer, *more)) is not None and less.fits:
                taken, found = fewer, less
        return found

    def devices(self, changes: Sequence[Change], needed: Sequence[Change] = ()) -> Proposal | None:
        """The least number of devices, doubled each time, that is enough with the changes, and those that it needs."""
        wanted = [change for change in CHANGES if change in changes or change in needed]
        taken, number, before = self.applicable(wanted), 2 * self.device.count, float("inf")
        while number <= _MOST_DEVICES and (all_of_them := self.proposal(taken, _devices(number))) is not None:
            if all_of_them.fits:
                return self.least(taken, _devices(number), needed=needed)
            if all_of_them.peak > _LEAST_GAIN * before:  # what each holds by itself is too much
                break
            before, number = all_of_them.peak, 2 * number
        return None

    def nearest(self, changes: Sequence[Change]) -> Proposal | None:
        """All changes that can be made, with rows halved until they are enough or very short; `--length` of two stacks
        would be that of both, so theirs stay."""
        taken = self.applicable(changes)
        found, length = self.proposal(taken), self._length(taken)
        while found is not None and not found.fits and length > _SHORTEST:
            length = max(length // 2, _SHORTEST)
            found = self.proposal(taken, _rows_of(length)) or found
        return found

    def _length(self, changes: Sequence[Change]) -> int:
        """Tokens of a row, where `--length` can make them fewer."""
        words = self.words(changes)
        step = None if words is None else self.step(words)
        return 0 if step is None or step.setting.source else step.setting.length


def fit_of(subject: Subject, device: Device, asked: AskedOfStep, step: Step) -> Fit:
    """Whether a step fits into the devices, whose memory is known, and else what would make it fit."""
    usable, peak = round((device.memory or 0) * (1 - MARGIN)), step.memory().peak
    if peak <= usable:
        return Fit(True, peak, usable)
    plans = Plans(subject, device, asked, step, usable)
    single = [found for change in CHANGES if (found := plans.proposal([change])) is not None]
    more = plans.devices([])
    single += [more] if more is not None else []
    return Fit(False, peak, usable, tuple(single), tuple(_combined(plans, single)))


def _combined(plans: Plans, single: Sequence[Proposal]) -> Iterator[Proposal]:
    """What is enough together and cheaper than what is enough alone."""
    enough = {found.changes[0] for found in single if found.fits}
    trained = [change for change in CHANGES if change.training != "frozen"]
    adapters = [change for change in CHANGES if change.training == "frozen"]
    if any(change.name in enough for change in trained):
        return
    mild = [change for change in trained if change.training != "drastic"]
    found = [plans.least(mild) or plans.least(trained)]
    if not any(change.name in enough for change in adapters):
        found.append(_first(plans.least(mild, needed=[adapter]) for adapter in adapters))
        if found[-1] is None:
            found.append(_first(plans.devices(mild, needed=[adapter]) for adapter in adapters))
    found.append(plans.devices([change for change in CHANGES if change.training == "same"]))
    if not any(found) and not enough:
        found.append(plans.nearest([*mild, *adapters[-1:]]))
    yield from (one for one in found if one is not None and len(one.changes) > 1)


def _first(found: Iterator[Proposal | None]) -> Proposal | None:
    return next((one for one in found if one is not None), None)


def _devices(number: int) -> Option:
    return Option(f"--gpus {number}", f"{number} devices", "devices; weights are sent to and fro")


def _rows_of(length: int) -> Option:
    return Option(f"--length {length}", f"rows of {length:,} tokens", "longer texts are cut")


def _chunked(plans: Plans, setting: Setting) -> Words | None:
    size = setting.config.loss_chunk_size
    chunks = setting.loss == "model" and (size == 0 or size > 1024)
    return ("model.config.loss_chunk_size=1024",) if chunks else None


def _fused(plans: Plans, setting: Setting) -> Words | None:
    config = setting.config
    able = not config.attention_sinks and config.attn_logit_softcapping is None
    return ("model.attn_implementation=sdpa",) if setting.attention == "eager" and able else None


def _mixed(plans: Plans, setting: Setting) -> Words | None:
    return ("train.bf16=true",) if setting.mixed == "no" and setting.dtype == "float32" else None


def _one_row(plans: Plans, setting: Setting) -> Words | None:
    """With as many rows a step as before."""
    train, rows = plans.subject.recipe.train, setting.batch // setting.rows_of_one
    if rows == 1:
        return None
    one = "train.per_device_train_batch_size=1" if plans.asked.batch is None else "--batch 1"
    if GLOBAL_BATCH in train:  # which counts the passes itself
        return (one,)
    return one, f"train.gradient_accumulation_steps={setting.accumulation * rows}"


def _checkpointed(plans: Plans, setting: Setting) -> Words | None:
    return ("train.gradient_checkpointing=true",) if setting.checkpointing == "none" else None


def _eight_bits(plans: Plans, setting: Setting) -> Words | None:
    wide = setting.optimizer in ("adamw_torch", "adamw_torch_fused")
    return ("train.optim=adamw_bnb_8bit",) if wide else None


def _narrow(plans: Plans, setting: Setting) -> Words | None:
    trained = setting.adapter.kind == "none" and setting.dtype == "float32"
    return ("model.dtype=bfloat16",) if trained else None


def _lora(plans: Plans, setting: Setting) -> Words | None:
    return ("adapter.kind=lora adapter.r=16 model.dtype=bfloat16",) if setting.adapter.kind == "none" else None


def _qlora(plans: Plans, setting: Setting) -> Words | None:
    if setting.quantization is not None or setting.adapter.kind not in ("none", "lora"):
        return None
    adapter = "" if setting.adapter.kind == "lora" else "adapter.kind=lora adapter.r=16 "
    options = "load_in_4bit=true bnb_4bit_quant_type=nf4 bnb_4bit_use_double_quant=true bnb_4bit_compute_dtype=bfloat16"
    packed = " ".join(f"model.quantization.{option}" for option in options.split(" "))
    return (f"{adapter}{packed} model.dtype=bfloat16",)


CHANGES = (
    Change("loss in chunks", "nothing", _chunked, "same"),
    Change("attention without its scores", "nothing", _fused, "same"),
    Change("products in bf16", "nothing: masters stay in fp32", _mixed, "same"),
    Change("one row at a time", "little: as many rows a step, one after another", _one_row, "same"),
    Change("checkpointing", "a second forward pass: about a third", _checkpointed, "same"),
    Change("8-bit optimiser", "coarser averages of gradients", _eight_bits, "coarser"),
    Change("weights in bf16", "small updates round away", _narrow, "drastic"),
    Change("LoRA", "trains little beside the model", _lora, "frozen"),
    Change("QLoRA", "the base is rounded to 4 bits, and unpacked at each product", _qlora, "frozen"),
)


def verdict(fit: Fit, memory: int) -> str:
    """In one line."""
    beyond = fit.peak - fit.usable
    of = f"{gigabytes(fit.peak)} of {gigabytes(fit.usable)} usable ({gigabytes(memory)} less {MARGIN:.0%})"
    return f"fits: {of}" if fit.fits else f"does not fit: {of}, {gigabytes(beyond)} too much"
