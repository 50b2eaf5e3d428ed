"""Figures of a run in two processes over gloo: those of one process, whatever the strategy."""

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from anyformer.recipes.loading import load_recipe
from anyformer.recipes.run import run_recipe

HERE = Path(__file__).parent
RECIPE = """
model:
  preset: smollm2-135m
  tokenizer: builtin:bytes
  config: {{num_hidden_layers: 2, hidden_size: 32, num_attention_heads: 4, num_key_value_heads: 2,
    intermediate_size: 64, z_loss_coef: 1e-2, loss_chunk_size: 64}}
data: {{source: {texts}, eval_fraction: 0.1}}
objective: {{kind: pretrain, max_length: 64}}
train: {{output_dir: {folder}, max_steps: 4, global_batch_size: 4, per_device_train_batch_size: 2, logging_steps: 2,
  save_strategy: "no", learning_rate: 1e-3, bf16: false}}
eval: {{samples: 0, before: false}}
logging: {{peak_tflops: 0.1}}
"""
RUNS = [("ddp", "adamw_torch_fused"), ("fsdp2", "adamw_torch_fused"), ("ddp", "muon"), ("fsdp2", "muon")]


def figures(folder):
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file)), json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of the four runs in two processes, and of one process for each optimiser."""
    folder = tmp_path_factory.mktemp("processes")
    path = folder / "recipe.yaml"
    texts = HERE.parent / "small" / "texts.jsonl"
    path.write_text(RECIPE.format(texts=texts, folder=folder / "run"), encoding="utf-8")
    jobs = [
        {
            "recipe": str(path),
            "overrides": [f"train.output_dir={folder}/{strategy}-{optim}", f"train.optim={optim}"],
            "strategy": strategy,
        }
        for strategy, optim in RUNS
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = HERE.parent / "parallel" / "worker.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}", worker]
    done = subprocess.run(
        [*command, folder / "jobs.json", folder / "results.json"],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((folder / "results.json").read_text(encoding="utf-8")) == [""] * len(RUNS)
    for optim in ("adamw_torch_fused", "muon"):
        run_recipe(load_recipe(path, [f"train.output_dir={folder}/one-{optim}", f"train.optim={optim}"]))
    return folder


@pytest.mark.parametrize(("strategy", "optim"), RUNS)
def test_tokens_and_losses_are_those_of_one_process(runs, strategy, optim):
    rows, metrics = figures(runs / f"{strategy}-{optim}")
    expected, alone = figures(runs / f"one-{optim}")
    # Muon multiplies in bf16 inside, and shards round otherwise.
    tolerance = 1e-4 if optim == "muon" else 1e-5
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected] and len(rows) == 2
    for row, other in zip(rows, expected, strict=True):
        for name in ("loss", "z_loss", "learning_rate"):
            assert float(row[name]) == pytest.approx(float(other[name]), rel=tolerance), name
    assert metrics["training"]["tokens"] == alone["training"]["tokens"]
    assert metrics["training"]["total_flos"] == pytest.approx(alone["training"]["total_flos"], rel=1e-9)


def test_the_peak_is_that_of_all_devices(runs):
    """Tokens a second are of both processes, the MFU a share of both peaks."""
    training = figures(runs / "ddp-adamw_torch_fused")[1]["training"]
    seconds = training["tokens"] / training["tokens_per_second"]
    of_both = training["total_flos"] / (2 * seconds * 0.1e12)
    # The two processes need not be in their steps for the same time; the rate is of the slower one.
    assert of_both <= training["mfu"] * 1.0001 and training["mfu"] < 1.5 * of_both
