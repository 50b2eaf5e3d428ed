"""A recipe on a tiny model and rows that it can learn, and the process that starts others."""

import json
import sys
from contextlib import contextmanager

import pytest
from killing import Zygote

from anyformer.recipes.loading import load_recipe
from anyformer.recipes.progress import TrainingProgress

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture
def rows(tmp_path):
    """48 counting rows: `count from two` -> `two three four`."""
    lines = [
        json.dumps({"prompt": f"count {i} from {WORDS[i % 7]}", "completion": " ".join(WORDS[i % 7 : i % 7 + 3])})
        for i in range(48)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint, rows):
    """A function: a recipe with overrides."""
    text = f"""
model: {{path: {tiny_checkpoint}}}
adapter: {{kind: lora, r: 4, lora_dropout: 0.1, target_modules: all-linear}}
data: {{source: {rows}, eval_fraction: 0.2}}
train:
  output_dir: {tmp_path / "run"}
  max_steps: 12
  per_device_train_batch_size: 4
  learning_rate: 2e-2
  max_length: 64
  logging_steps: 3
  save_steps: 5
  gradient_checkpointing: false
  seed: 7
eval: {{samples: 2, max_new_tokens: 6}}
"""
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return lambda *overrides: load_recipe(path, overrides)


@pytest.fixture
def interrupted(monkeypatch):
    """A function: a context in which a run is stopped, as by Ctrl-C, when its first checkpoint is there."""

    def halt(*args, **kwargs):
        raise KeyboardInterrupt

    @contextmanager
    def until(owner=TrainingProgress, method="on_save"):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, halt)
            with pytest.raises(KeyboardInterrupt):
                yield

    return until


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    if sys.platform != "linux":
        pytest.skip("forks a process with torch in it, and reads /proc")
    with Zygote(tmp_path_factory.mktemp("zygote") / "log") as started:
        yield started
