"""Jobs in two processes of this machine, and what their runs left."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

WORKER = Path(__file__).with_name("worker.py")

# A shift of all keys alike changes no attention, so the gradient is rounding, and Adam makes steps of it.
SHIFTS = ("k_proj.bias", "k_norm.bias")

MODEL = """
  preset: mini-gpt
  tokenizer: builtin:bytes
  config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 64,
           max_position_embeddings: 64, initializer_range: 0.3}
"""
# 20 steps of 8 rows; 0.3 as the standard deviation of the weights, so that attention matters.
RECIPE = """
model: {model}
data: {{source: {data}, eval_fraction: 0.2}}
objective: {{kind: pretrain, packing: documents, max_length: 48}}
train:
  output_dir: {folder}
  max_steps: 20
  global_batch_size: 8
  learning_rate: 1e-3
  logging_steps: 1
  save_steps: 10
  seed: 3
  bf16: false
  use_cpu: true
eval: {{samples: 1, max_new_tokens: 4}}
logging: {{plot: false}}
"""


@dataclass
class Job:
    """A run of a recipe with a strategy.

    Attributes:
        fault: what is spoiled in it, see `worker.SPOILED`.
        check: with the costly checks.
    """

    recipe: Path
    folder: Path
    strategy: str
    overrides: list[str] = field(default_factory=list)
    resume: bool = False
    fault: str = ""
    check: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": str(self.recipe),
            "overrides": [*self.overrides, f"train.output_dir={self.folder}"],
            "strategy": self.strategy,
            "resume": self.resume,
            "fault": self.fault,
            "check": self.check,
        }


def write_texts(path: Path, count: int = 40) -> Path:
    """Texts of 5 to 90 bytes."""
    rng, words = random.Random(0), ["one", "two", "three", "cat", "dog", "mat", "log", "sat", "on", "the"]
    texts = [" ".join(rng.choices(words, k=rng.randint(2, 20))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_recipe(folder: Path, data: Path, model: str = MODEL) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=model, data=data, folder=folder / "unused"), encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_jobs(
    jobs: list[Job], folder: Path, *, processes: int = 2, seconds: float = 600, zygote: Any = None
) -> list[str]:
    """Run jobs one after another in the same processes; of each "", or the text of its UserError.

    Args:
        zygote: a `killing.Zygote` that forks the processes, in place of torchrun.
    """
    given, results = folder / "jobs.json", folder / "results.json"
    given.write_text(json.dumps([job.as_dict() for job in jobs]), encoding="utf-8")
    if zygote is not None:
        done = zygote.run([str(given), str(results)], script=str(WORKER), processes=processes)
        assert done == [0] * processes, zygote.log.read_text()[-6000:]
        return json.loads(results.read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(free_port()), str(WORKER), str(given), str(results)]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, encoding="utf-8", timeout=seconds, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    return json.loads(results.read_text(encoding="utf-8"))


def stopped_at(run: Path, copy: Path, step: int) -> Path:
    """A finished run's folder as it was after a step that was saved."""
    copy.mkdir()
    for name in (".anyformer-run", "recipe.yaml"):
        shutil.copy(run / name, copy / name)
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    kept = ("data_digest", "before", "samples_before", "rows_a_step")
    begun = {name: metrics[name] for name in kept if name in metrics}
    (copy / "metrics.json").write_text(json.dumps(begun), encoding="utf-8")
    for checkpoint in run.glob("checkpoint-*"):
        if int(checkpoint.name.partition("-")[2]) <= step:
            shutil.copytree(checkpoint, copy / checkpoint.name)
    return copy


def figures(folder: Path, name: str) -> list[float]:
    """What was logged under a name, step by step."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["finished"]
    return [entry[name] for entry in metrics["history"] if name in entry]


def weights(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted([*folder.glob("model*.safetensors"), *folder.glob("adapter_model.safetensors")]):
        found |= load_file(file)
    return found


def assert_same_run(first: Path, second: Path, steps: int = 20) -> None:
    """Losses to 1e-5, gradient norms to 1e-4, final weights to 1e-4."""
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        expected, got = figures(first, name), figures(second, name)
        assert len(expected) == len(got) == steps, (name, len(expected), len(got))
        apart = max(abs(a - b) / max(abs(a), 1.0) for a, b in zip(expected, got, strict=True))
        assert apart <= tolerance, (second.name, name, apart)
    expected, got = weights(first), weights(second)
    assert expected.keys() == got.keys() and expected
    for name in expected:
        if name.endswith(SHIFTS):
            continue
        apart = float((expected[name] - got[name]).abs().max())
        assert apart <= 1e-4, (second.name, name, apart)
