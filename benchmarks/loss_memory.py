"""Memory and time of a training step under a large vocabulary: Anyformer's loss in chunks and the stock Llama class.

    python benchmarks/loss_memory.py

One set of random weights in the shape of SmolLM2-135M with fewer layers, fp32, one batch whose tokens are all learned.
Memory: each side takes one step, forward and backward, in a process of its own; what counts is how far the step lifts
the process's resident memory at most (VmHWM) over where it was before. Time: both sides take turns in one process, so
that what else the machine does falls on both; beside it stands the processor's own time, which leaves out waiting for
others. There the losses and gradients of both are compared, too.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from anyformer import AnyformerConfig, AnyformerForCausalLM, to_hf

SIDES = ("anyformer", "stock Llama")
VOCABULARY = 49152


def model_of(side: str, options: argparse.Namespace) -> torch.nn.Module:
    """The side's model; the weights are the same for both."""
    torch.manual_seed(0)
    config = AnyformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=options.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        loss_chunk_size=options.chunk,
    )
    ours = AnyformerForCausalLM(config)
    return (ours if side == "anyformer" else to_hf(ours)).train()


def batch_of(options: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (options.batch, options.length), generator=generator)


def step(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, float, float]:
    """Seconds of forward and backward, the processor's seconds of them, and the loss."""
    model.zero_grad(set_to_none=True)
    started, busy = time.perf_counter(), time.process_time()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return time.perf_counter() - started, time.process_time() - busy, loss.item()


def resident(name: str) -> float:
    """MB of this process's resident memory: now ("VmRSS") or at most so far ("VmHWM")."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6


def measure_memory(side: str, options: argparse.Namespace) -> None:
    """One step in this process, which does nothing else; prints MB and the loss."""
    model, tokens = model_of(side, options), batch_of(options)
    gc.collect()
    before, highest = resident("VmRSS"), resident("VmHWM")
    loss = step(model, tokens)[-1]
    after = resident("VmHWM")
    assert after > highest, "building the model took more than the step: nothing was measured"
    print(json.dumps({"before": before, "peak": after - before, "loss": loss}))


def measured_in_child(side: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def gradient_difference(ours: torch.nn.Module, stock: torch.nn.Module) -> float:
    """The largest difference of a gradient, in parts of the largest value of that parameter's gradient."""
    theirs = dict(stock.named_parameters())  # Llama's names are ours
    worst = 0.0
    for name, parameter in ours.named_parameters():
        expected = theirs.pop(name).grad
        worst = max(worst, ((parameter.grad - expected).abs().max() / expected.abs().max()).item())
    assert not theirs, f"without a counterpart: {sorted(theirs)}"
    return worst


def report(memory: dict[str, dict[str, float]], steps: dict[str, list[tuple[float, float, float]]]) -> None:
    """Print how both sides compare; the first round warms up."""
    ours, stock = SIDES
    for side in SIDES:
        wall, busy, _ = (statistics.median(values) for values in zip(*steps[side][1:], strict=True))
        print(f"{side:12} median {wall:.2f} s, {busy:.2f} s of the processor")
    print(f"stock takes {memory[stock]['peak'] / memory[ours]['peak']:.2f} x our memory")
    for what, column in (("time", 0), ("processor time", 1)):
        ratios = [a[column] / b[column] for a, b in zip(steps[ours][1:], steps[stock][1:], strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"our {what} is {statistics.median(ratios):.2f} x stock's; round by round {each}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=AnyformerConfig().loss_chunk_size, help="loss_chunk_size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure_memory(options.side, options)
        return
    print(
        f"{torch.get_num_threads()} threads, {options.batch} x {options.length} tokens, vocabulary {VOCABULARY}, "
        f"{options.layers} layers, chunks of {options.chunk} tokens, {options.rounds} rounds",
        flush=True,
    )
    memory = {}
    for side in SIDES:
        memory[side] = measured_in_child(side)
        print(f"{side:12} a step takes {memory[side]['peak']:.0f} MB over {memory[side]['before']:.0f}", flush=True)
    models, tokens = {side: model_of(side, options) for side in SIDES}, batch_of(options)
    steps: dict[str, list[tuple[float, float, float]]] = {side: [] for side in SIDES}
    for index in range(options.rounds + 1):
        for side in SIDES:
            steps[side].append(step(models[side], tokens))
            wall, busy, loss = steps[side][-1]
            print(f"{side:12} round {index}: {wall:.2f} s, {busy:.2f} s of the processor, loss {loss:.6f}", flush=True)
    report(memory, steps)
    ours, stock = SIDES
    apart = abs(steps[ours][-1][-1] - steps[stock][-1][-1])
    gradients = gradient_difference(models[ours], models[stock])
    print(f"losses differ by {apart:.1e}, gradients by at most {gradients:.1e} of the largest value in each")
    assert apart < 1e-5 and gradients < 1e-5, "the two sides compute different things"


if __name__ == "__main__":
    main()
