"""Policies start at their references, and `--check` says so, or what is wrong."""

import json

import pytest
import torch
from tuning import assert_equal_weights

from anyformer.recipes.errors import UserError
from anyformer.recipes.ppo import PPOTrainer
from anyformer.recipes.run import run_recipe

START = "the policy starts at its reference"
DROPOUT = "model.config={attention_dropout: 0.3, hidden_dropout: 0.3}"
POLICIES = ["grpo", "rloo", "ppo"]
REWARD = """
def vowels(prompts, completions, **columns):
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]
"""


@pytest.fixture
def policy(recipe, tmp_path):
    """A function: a short recipe of a policy under dropout."""
    file = tmp_path / "reward.py"
    file.write_text(REWARD, encoding="utf-8")

    def build(kind, *overrides):
        common = ["~train.max_length", "~eval.max_new_tokens", "eval.before=false", "eval.samples=0", DROPOUT]
        common += [f"objective={{kind: {kind}, reward: '{file}:vowels'}}", "train.per_device_train_batch_size=8"]
        common += ["train.max_completion_length=6", "train.max_steps=2", "train.logging_steps=1", "train.beta=0.1"]
        groups = [] if kind == "ppo" else ["train.num_generations=4"]
        return recipe(*common, *groups, "data.max_eval_rows=2", *overrides)

    return build


@pytest.fixture
def adapter(recipe, tmp_path):
    """The folder of an adapter that has been trained."""
    folder = tmp_path / "tuned"
    run_recipe(recipe("train.max_steps=3", "eval.samples=0", f"train.output_dir={folder}"))
    return folder / "adapter"


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", POLICIES)
def test_a_policy_that_goes_on_from_an_adapter_starts_at_that_adapter(policy, adapter, kind, capsys):
    """Not at the model without it: what was tuned must not be unlearned. Under dropout of model and adapter."""
    metrics = metrics_of(run_recipe(policy(kind, f"adapter={{path: {adapter}}}"), check=True))
    distances = [entry["kl"] for entry in metrics["history"] if "kl" in entry]
    assert distances[0] == 0.0 and abs(distances[1]) > 0
    assert metrics["checks"][START] == "passed"


@pytest.mark.parametrize("kind", POLICIES)
def test_what_was_checked_and_what_does_not_apply_is_said(policy, kind, capsys):
    metrics = metrics_of(run_recipe(policy(kind, "adapter={kind: none}"), check=True))
    said = " ".join(capsys.readouterr().out.split()).split("Check: ")[1:]
    assert said[0].startswith(f"{START}: passed.")
    assert said[1].startswith("does not apply: packed documents do not see each other (no rows are packed); ")
    assert "accumulated gradients equal those of one batch (each step samples" in said[1] and len(said) == 2
    checks = metrics["checks"]
    assert checks[START] == "passed" and len(checks) == 4
    assert "nothing to learn" in checks["adapters move in the first two steps"]


def test_without_a_reference_there_is_none_to_start_at(policy):
    checks = metrics_of(run_recipe(policy("grpo", "train.beta=0.0"), check=True))["checks"]
    assert checks[START] == "there is no reference: train.beta is 0"


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_dropout_that_parts_policy_and_reference_is_caught(policy, monkeypatch, kind):
    monkeypatch.setattr(f"trl.trainer.{kind}_trainer.disable_dropout_in_model", lambda model: None)
    with pytest.raises(UserError, match=r"not its own reference before the first update.*KL divergence is -?\d"):
        run_recipe(policy(kind), check=True)
    assert run_recipe(policy(kind), overwrite=True)  # nobody asked


def test_a_reference_that_is_another_model_is_caught(policy, monkeypatch):
    made = PPOTrainer.__init__

    def elsewhere(self, *given, **named):
        made(self, *given, **named)
        for name, value in self.reference.items():
            self.reference[name] = value + 0.05

    monkeypatch.setattr(PPOTrainer, "__init__", elsewhere)
    with pytest.raises(UserError, match="not its own reference before the first update"):
        run_recipe(policy("ppo"), check=True)


@pytest.mark.parametrize("kind", POLICIES)
def test_checking_changes_nothing(policy, tmp_path, kind):
    """Here with a fresh adapter, which starts at 0 too."""
    plain = run_recipe(policy(kind, f"train.output_dir={tmp_path / 'plain'}"))
    torch.manual_seed(99)
    checked = run_recipe(policy(kind, f"train.output_dir={tmp_path / 'checked'}"), check=True)
    assert_equal_weights(plain, checked)
    logs = [
        [{k: e[k] for k in ("kl", "reward", "grad_norm") if k in e} for e in metrics_of(folder)["history"]]
        for folder in (plain, checked)
    ]
    assert logs[0] == logs[1] and logs[0][0]["kl"] == 0.0
    assert metrics_of(checked)["checks"][START] == "passed"
