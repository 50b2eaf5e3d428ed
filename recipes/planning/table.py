"""A plan as a table for people."""

from collections.abc import Iterator

from .costs import Costs
from .fit import Proposal, verdict
from .memory import Memory
from .setting import Setting
from .units import count, duration, gigabytes

Row = tuple[str, str]
# What the smallest models had that Hoffmann et al. 2022 (arXiv:2203.15556, sec. 3) fitted the law to.
LEAST_PARAMETERS, LEAST_TOKENS = 70e6, 5e9


def rows(costs: Costs) -> Iterator[Row]:
    """Lines of (name, value); a name of "" goes on with the line before."""
    yield from _step(costs)
    yield from _parameters(costs)
    yield from _flops(costs)
    yield from _memory(costs)
    yield from _run(costs)
    yield from _optimum(costs)
    yield from _fit(costs)
    for remark in costs.remarks:
        yield "assumed", remark


def as_text(costs: Costs) -> str:
    """The table."""
    lines = list(rows(costs))
    width = max(len(name) for name, _ in lines)
    return "\n".join([f"Plan of {costs.name}", *(f"{name:>{width}}  {value}" for name, value in lines)])


def _step(costs: Costs) -> Iterator[Row]:
    setting = costs.setting
    rows = f"{setting.batch} row{'s' * (setting.batch > 1)} of {setting.length:,} tokens"
    if setting.source:
        rows += f" behind {setting.source:,} of the encoder"
    if setting.accumulation > 1:
        rows += f", {setting.accumulation} times"
    if setting.gpus > 1:
        rows += f", on {setting.gpus} devices"
    yield "step", f"{rows}: {setting.tokens_a_step:,} tokens"
    mixed = "" if setting.mixed == "no" else f", products in {setting.mixed}"
    adapter = "all weights" if setting.adapter.kind == "none" else setting.adapter.kind
    again = ", checkpointing" if setting.checkpointing == "layers" else ""
    packed = f" but for the base in {_bits(setting)} bits" if setting.quantization is not None else ""
    yield "", f"{adapter}, weights in {setting.dtype}{packed}{mixed}, {setting.optimizer}, {setting.attention}{again}"


def _bits(setting: Setting) -> int:
    return 4 if setting.quantization is not None and setting.quantization.load_in_4bit else 8


def _parameters(costs: Costs) -> Iterator[Row]:
    found = costs.parameters
    active = "" if found.active == found.total else f", {count(found.active)} active for a token"
    yield "parameters", f"{count(found.total)} ({found.total:,}){active}"
    for part, number in found.parts.items():
        if number:
            yield "", f"{part:<12}{count(number):>10}  {number / found.total:6.1%}"
    beside = f" ({count(found.adapter)} of them beside the model)" if found.adapter else ""
    yield "trainable", f"{count(found.trainable)}, {found.trainable / found.total:.2%} of the model{beside}"
    stored = f"; as stored {gigabytes(found.bytes['stored'])}" if costs.setting.quantization is not None else ""
    stored += f", {gigabytes(4 * found.adapter)} of it the adapter" if stored and found.adapter else ""
    sizes = f"{gigabytes(found.bytes['bfloat16'])} in 16 bits, {gigabytes(found.bytes['float32'])} in fp32"
    yield "weights", sizes + stored


def _flops(costs: Costs) -> Iterator[Row]:
    flops = costs.flops
    forward, backward, again, pairs = (
        number / flops.tokens for number in (flops.forward, flops.backward, flops.recomputed, flops.attention)
    )
    second = f" + {again:.3g} again" if again else ""
    yield "FLOPs", f"{flops.a_token:.3g} a token: forward {forward:.3g} + backward {backward:.3g}{second}"
    share = flops.attention / flops.total
    yield "", f"of these {pairs:.3g} ({share:.1%}) grow with the length: attention at {costs.setting.length:,} tokens"


def _memory(costs: Costs) -> Iterator[Row]:
    each = " of each device" if costs.setting.gpus > 1 else ""
    memory = costs.memory
    yield "memory", f"{gigabytes(memory.peak)}{each} at its peak, in {memory.at}"
    gathered = {"gathered": memory.gathered} if memory.gathered else {}
    parts = {"weights": memory.weights, "gradients": memory.gradients, "optimiser": memory.optimizer}
    for name, size in (parts | gathered).items():
        yield "", f"{name:<12}{gigabytes(size):>10}"
    kept, other = (
        (memory, costs.other_memory) if costs.setting.checkpointing == "none" else (costs.other_memory, memory)
    )
    yield "", f"{'activations':<12}{gigabytes(kept.activations):>10}, {gigabytes(other.activations)} with checkpointing"
    yield "", f"{'loss':<12}{gigabytes(memory.loss):>10}, logits and what the head makes of them"
    word = "with" if costs.setting.checkpointing == "none" else "without"
    yield "", f"{word} checkpointing {gigabytes(costs.other_memory.peak)} at its peak{_moment(costs.other_memory)}"
    if (cache := costs.cache) is not None:
        sizes = cache.bytes
        yield (
            "KV cache",
            (
                f"{gigabytes(sizes['bfloat16'])} in 16 bits for one text of {cache.tokens:,} tokens, "
                f"{gigabytes(sizes['int8'])} in 8"
            ),
        )


def _moment(memory: Memory) -> str:
    return f", in {memory.at}"


def _run(costs: Costs) -> Iterator[Row]:
    run = costs.run
    if run.tokens is None:
        yield "run", "its length is in the data: --tokens says it, or `anyformer train … --dry-run` counts them"
        return
    yield "run", f"{count(run.tokens)} tokens in {run.steps:,} steps, {run.flops:.3g} FLOPs"
    if run.seconds is None:
        yield "", "for the time give --throughput, tokens a second, or --flops of one device"
    else:
        yield "time", f"about {duration(run.seconds)}: {run.rate}"


def _optimum(costs: Costs) -> Iterator[Row]:
    best = costs.optimum
    if best is None:
        return
    ideal = f"{count(best.best_tokens)} tokens, {best.best_tokens / best.parameters:.1f} a parameter"
    yield "optimum", f"this size is the best use of compute at {ideal} (Chinchilla's law, refitted)"
    if best.tokens is not None:
        here = f"{best.tokens / best.parameters:.3g} tokens a parameter, 6ND = {best.compute:.3g} FLOPs"
        there = f"{count(best.best_parameters)} on {count(best.best_tokens_at_compute)} tokens"
        yield "", f"this run: {here}, loss {best.loss:.3f} by the law; best there: {there}, {best.best_loss:.3f}"
        if best.parameters < LEAST_PARAMETERS or best.tokens < LEAST_TOKENS:
            yield "", "the law was fitted to more parameters or tokens than these: its losses are a guess here"


def _fit(costs: Costs) -> Iterator[Row]:
    fit, memory = costs.fit, costs.device.memory
    if fit is None or memory is None:
        return
    yield "device", verdict(fit, memory)
    for title, found in (("one change", fit.single), ("together", fit.combined)):
        for number, proposal in enumerate(found):
            yield title if not number else "", _proposal(proposal)
            yield "", f"{'':<15}  [{' '.join(proposal.overrides)}]"
    tried = (*fit.single, *fit.combined)
    if not fit.fits and not any(one.fits for one in tried):
        yield "", "nothing that was tried is enough: a smaller model, or shorter rows by --length"


def _proposal(proposal: Proposal) -> str:
    word = "fits" if proposal.fits else "no"
    cost = f": {proposal.costs[0]}" if len(proposal.changes) == 1 else ""
    return f"{word:<5}{gigabytes(proposal.peak):>10}  {' + '.join(proposal.changes)}{cost}"
