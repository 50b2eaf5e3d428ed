"""Whole runs on preferences: better on held-out rows, saved, opened again, resumed bit for bit."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tuning import assert_equal_weights

from anyformer.recipes.loading import load_recipe
from anyformer.recipes.run import run_recipe

WORDS = ["one", "two", "three", "four", "five", "six", "seven"]


@pytest.fixture
def rows(tmp_path):
    """40 pairs that a tiny model can learn: counting upwards is chosen, repeating is rejected."""
    lines = []
    for i in range(40):
        first = i % 5
        question = [{"role": "user", "content": f"{i} from {WORDS[first]}"}]
        good, bad = " ".join(WORDS[first : first + 3]), " ".join([WORDS[first]] * 3)
        sides = ([{"role": "assistant", "content": text}] for text in (good, bad))
        lines.append(json.dumps(dict(zip(("prompt", "chosen", "rejected"), (question, *sides), strict=True))))
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint, rows):
    def load(kind, *overrides):
        text = f"""
model: {{path: {tiny_checkpoint}}}
adapter: {{kind: lora, r: 4, lora_dropout: 0.1, target_modules: all-linear}}
data: {{source: {rows}, eval_fraction: 0.2}}
objective: {{kind: {kind}}}
train:
  output_dir: {tmp_path / "run"}
  max_steps: 16
  per_device_train_batch_size: 4
  learning_rate: 1e-2
  max_length: 64
  logging_steps: 4
  gradient_checkpointing: false
  seed: 7
eval: {{samples: 1, max_new_tokens: 4}}
"""
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return load_recipe(path, overrides)

    return load


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("dpo", ()),
        (
            "dpo",
            ("adapter={kind: none}", "train.learning_rate=1e-3", "train.eval_strategy=steps", "train.eval_steps=8"),
        ),
        ("dpo", ("adapter.merge=false", "train.gradient_checkpointing=true", "train.loss_type=[sigmoid, sft]")),
        ("kto", ()),
        ("kto", ("adapter={kind: none}", "train.learning_rate=1e-3", "train.loss_type=apo_zero_unpaired")),
        ("orpo", ()),
        ("cpo", ("train.gradient_checkpointing=true", "train.gradient_accumulation_steps=2")),
        (
            "simpo",
            ("adapter={kind: none}", "train.learning_rate=1e-3", "train.eval_strategy=steps", "train.eval_steps=8"),
        ),
        ("reward", ()),
        ("reward", ("adapter={kind: none}", "train.learning_rate=3e-3", "train.gradient_checkpointing=true")),
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v)[:40],
)
def test_a_run_is_better_on_held_out_pairs_and_opens_again(recipe, kind, overrides, capsys):
    folder = run_recipe(recipe(kind, *overrides), check=True)
    metrics = metrics_of(folder)
    assert metrics["finished"]  # opened again, with the same figures
    before, after = metrics["before"], metrics["after"]
    assert after["loss"] < before["loss"] - 0.02
    assert after["margin"] > before["margin"]
    assert before["rows"] == after["rows"] == (16 if kind == "kto" else 8)
    if kind in ("dpo", "kto"):
        assert before["margin"] == before["accuracy"] == 0.0 and after["accuracy"] > 0.5
    auto = "AutoModelForSequenceClassification" if kind == "reward" else "AutoModelForCausalLM"
    getattr(transformers, auto).from_pretrained(folder)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "held-out accuracy" in card and f"{after['margin']:.4f}" in card and auto in card
    output = capsys.readouterr().out
    assert "⟦" in output and "supervised" in output and "held-out margin" in output
    assert not (folder / "adapter" / "ref").exists()


@pytest.mark.parametrize("kind", ["dpo", "kto", "orpo", "reward"])
@pytest.mark.parametrize("adapter", ["{kind: lora, r: 4, lora_dropout: 0.1}", "{kind: none}"], ids=["lora", "full"])
def test_resume_is_bit_equal(recipe, tmp_path, interrupted, kind, adapter):
    """Stopped at step 5 of 8 with dropout configured: the reference and the last weights are the undisturbed run's."""
    common = (f"adapter={adapter}", "model.config={attention_dropout: 0.1}", "train.max_steps=8", "train.save_steps=5")
    common += ("train.learning_rate=1e-3", "eval.samples=0")
    whole = run_recipe(recipe(kind, *common, f"train.output_dir={tmp_path / 'whole'}"))
    halted = recipe(kind, *common, f"train.output_dir={tmp_path / 'halted'}")

    with interrupted():
        run_recipe(halted)
    resumed = run_recipe(halted, resume=True)
    assert_equal_weights(whole, resumed)
    assert metrics_of(resumed)["after"] == metrics_of(whole)["after"]


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_an_adapter_is_trained_further_from_where_it_stood(recipe, tmp_path, kind):
    """Its start is the reference, before and after a resume; no copy of it is left behind."""
    first = run_recipe(recipe("orpo", f"train.output_dir={tmp_path / 'first'}", "train.max_steps=8"))
    further = (f"adapter={{path: {first / 'adapter'}}}", "train.save_steps=4", "train.max_steps=8")
    folder = run_recipe(recipe(kind, *further))
    metrics = metrics_of(folder)
    assert metrics["before"]["margin"] == 0.0 and metrics["after"]["loss"] < metrics["before"]["loss"] - 0.02
    start, end = (load_file(f / "adapter" / "adapter_model.safetensors") for f in (first, folder))
    assert start.keys() == end.keys() and not any(torch.equal(start[n], end[n]) for n in start if "lora_B" in n)
    assert not list(folder.rglob("ref"))
    (folder / "metrics.json").write_text(json.dumps({"before": metrics["before"]}), encoding="utf-8")
    shutil.rmtree(folder / "checkpoint-8")
    again = load_file(run_recipe(recipe(kind, *further), resume=True) / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(end[name], again[name]) for name in end)


def test_the_plan_counts_a_frozen_reference(recipe, capsys):
    plain = ("adapter={kind: none}",)
    run_recipe(recipe("dpo", *plain), dry_run=True)
    assert ", reference" not in capsys.readouterr().out
    run_recipe(recipe("dpo", *plain, "train.precompute_ref_log_probs=false"), dry_run=True)
    output = capsys.readouterr().out
    assert ", reference 0.1 MB)" in output


def test_unpaired_rows_are_read_from_files(recipe, tmp_path):
    path = tmp_path / "labelled.jsonl"
    rows = [
        {"prompt": f"{i} from {WORDS[i % 5]}:", "completion": f" {WORDS[(i + good) % 5]}", "label": bool(good)}
        for i in range(20)
        for good in (0, 1)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    metrics = metrics_of(run_recipe(recipe("kto", f"data.source={path}", "train.max_steps=24")))
    assert metrics["data"]["format"] == "unpaired-preference"
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 0.02
