"""Seconds that `anyformer plan` takes for large presets: its libraries, and the plan from the preset's name to JSON.

    OMP_NUM_THREADS=1 python benchmarks/plan.py llama-3-70b deepseek-v3

Each plan is the first of a process of its own, as that of the command is. The second line of a preset asks for devices
that are too small, so that what would make it fit is searched for.
"""

import statistics
import subprocess
import sys

ROUNDS = 3
PROGRAM = """
import contextlib, io, sys, time
began = time.perf_counter()
import torch, transformers.modeling_utils
from anyformer.recipes.planning.show import show_plan_of
loaded = time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    show_plan_of(sys.argv[1], gpu=sys.argv[2] or None, as_json=True)
print(loaded - began, time.perf_counter() - loaded)
"""


def measure(name: str, gpu: str) -> None:
    found = []
    for _ in range(ROUNDS):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, name, gpu], capture_output=True, text=True, check=True, timeout=600
        )
        found.append([float(number) for number in done.stdout.split()])
    libraries, plan = (statistics.median(column) for column in zip(*found, strict=True))
    where = f"for devices of {gpu}" if gpu else "alone"
    print(f"{name} {where}: libraries {libraries:.2f} s, plan {plan:.2f} s (medians of {ROUNDS} processes)")


if __name__ == "__main__":
    for preset in sys.argv[1:] or ["llama-3-70b", "deepseek-v3"]:
        measure(preset, "")
        measure(preset, "80GB")
