"""The line that the trainer's logs become."""

import json
from types import SimpleNamespace

import pytest

from anyformer.recipes.progress import COUNTED, TrainingProgress
from anyformer.recipes.run import run_recipe


@pytest.mark.parametrize("counter", COUNTED)
def test_tokens_a_second_from_either_counter(counter, monkeypatch):
    clock = iter([0.0, 4.0, 6.0])  # made, and two logs
    monkeypatch.setattr("anyformer.recipes.progress.time.monotonic", lambda: next(clock))
    lines: list[str] = []
    progress, args = TrainingProgress(), SimpleNamespace(logging_steps=5)
    progress.training_bar = SimpleNamespace(write=lines.append)
    for step, tokens in ((5, 400), (10, 1000)):
        state = SimpleNamespace(is_world_process_zero=True, global_step=step, max_steps=20)
        progress.on_log(args, state, None, logs={"loss": 2.0, counter: tokens})
    assert [line.split()[-2:] for line in lines] == [["100", "tokens/s"], ["300", "tokens/s"]]


def test_supervised_tuning_counts_its_tokens_without_padding(recipe):
    folder = run_recipe(
        recipe("train.logging_steps=1", "train.max_steps=3", "train.save_strategy=no", "eval.samples=0")
    )
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    seen = [entry["num_input_tokens_seen"] for entry in metrics["history"] if "loss" in entry]
    assert len(seen) == 3 and 0 < seen[0] < seen[1] < seen[2] < metrics["plan"]["tokens"]
