"""Memory of a long prompt, whole and in chunks: how far its prefill lifts the process's peak over where it was.

    python benchmarks/prefill_memory.py                                        # 32,768 tokens, whole, 512 and 2,048
    python benchmarks/prefill_memory.py --positions alibi --chunks 512 2048    # other positions

A model of SmolLM2-135M's sizes with random weights and the layers asked for, fp32, batch 1. Each line is a process of
its own that generates one token with `generate(..., prefill_chunk_size=N)`. "grown" is the peak of resident memory
(VmHWM, which Linux can set back) over what was there before; the cache is counted from its tensors and compared with
what the sizes say. What is left is what the prefill itself needed: to be bounded, it must not grow with the layers, and
with the prompt only as the mask of a chunk and the keys of one layer do.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from anyformer import AnyformerConfig, AnyformerForCausalLM

MB = 1e6


def model_of(options: argparse.Namespace) -> AnyformerForCausalLM:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 100000.0} if options.positions == "rope" else None
    config = AnyformerConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=options.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=options.length + 1,
        position_embedding=options.positions,
        norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=True,
    )
    return AnyformerForCausalLM(config).eval()


def resident(name: str) -> float:
    """MB of this process's resident memory: now ("VmRSS") or at most so far ("VmHWM")."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / MB


def measure(options: argparse.Namespace, chunk: int) -> None:
    """One prefill in this process, which does nothing else; prints what it took."""
    model = model_of(options)
    tokens = torch.randint(0, 49152, (1, options.length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.generate(tokens[:, :8], max_new_tokens=1)  # what is set up once
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far is that of building the model
    before = resident("VmHWM")
    started, busy = time.perf_counter(), time.process_time()
    settings: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(tokens, prefill_chunk_size=chunk or None, cache_implementation=options.cache, **settings)
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    peak = resident("VmHWM")
    held = sum(t.numel() * t.element_size() for layer in output.cache.layers for t in (layer.keys, layer.values)) / MB
    found = {"grown": peak - before, "cache": held, "seconds": seconds, "busy": busy}
    print(json.dumps(found | {"token": output.sequences[0, -1].item()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--layers", type=int, nargs="+", default=[4])
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 512, 2048], help="0: whole")
    parser.add_argument("--positions", choices=("rope", "alibi", "learned"), default="rope")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        options.layers = options.layers[0]
        measure(options, options.one)
        return
    print(
        f"{torch.get_num_threads()} threads, {options.length} tokens, {options.positions}, {options.cache} cache, fp32"
    )
    head = f"{'layers':>7}{'chunk':>8}{'grown MB':>10}{'cache MB':>10}{'left MB':>10}"
    print(f"{head}{'seconds':>9}{'of the processor':>18}")
    for layers in options.layers:
        predicted = 2 * layers * 3 * 64 * 4 * options.length / MB
        tokens = set()
        for chunk in options.chunks:
            command = [sys.executable, __file__, *sys.argv[1:], "--layers", str(layers), "--one", str(chunk)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(
                    f"{layers:7}{chunk or 'whole':>8}  ended with status {done.returncode}: "
                    f"{(done.stderr.strip().splitlines() or ['killed'])[-1][:150]}",
                    flush=True,
                )
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            tokens.add(found["token"])
            assert abs(found["cache"] / predicted - 1) < 0.01, f"a cache of {predicted:.0f} MB was expected"
            left = found["grown"] - found["cache"]
            print(
                f"{layers:7}{chunk or 'whole':>8}{found['grown']:10.0f}{found['cache']:10.0f}{left:10.0f}"
                f"{found['seconds']:9.0f}{found['busy']:18.0f}",
                flush=True,
            )
        assert len(tokens) <= 1, "the next token depends on the chunks"


if __name__ == "__main__":
    main()
