"""GRPO and RLOO from recipes: rewards rise, references are right, faults are told."""

import json
import shutil

import pytest
from tuning import assert_equal_weights

from anyformer.recipes.errors import UserError
from anyformer.recipes.run import run_recipe

REWARD = """
def vowels(prompts, completions, **columns):
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]
"""


@pytest.fixture
def policy(recipe, tmp_path):
    """A function: a recipe of an objective that rewards vowels."""
    file = tmp_path / "reward.py"
    file.write_text(REWARD, encoding="utf-8")

    def build(kind, *overrides):
        common = (
            f"objective={{kind: {kind}, reward: '{file}:vowels'}}",
            "~train.max_length",
            "train.per_device_train_batch_size=8",
            "train.num_generations=4",
            "train.max_completion_length=8",
            "train.max_steps=20",
            "train.save_steps=12",
            "train.learning_rate=2e-2",
            "data.max_eval_rows=6",
            "~eval.max_new_tokens",
        )
        return recipe(*common, *overrides)

    return build


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_held_out_reward_rises(policy, kind):
    full = ("adapter={kind: none}", "train.learning_rate=5e-3", "train.max_steps=40")
    metrics = metrics_of(run_recipe(policy(kind, *full)))
    assert metrics["after"]["reward"] > metrics["before"]["reward"] + 0.1
    assert metrics["after"]["rows"] == 6
    assert "(reward " in metrics["samples_after"][0]["answer"]
    assert any("reward" in entry for entry in metrics["history"])


@pytest.mark.parametrize("adapter", ["{kind: lora, r: 4}", "{kind: none}"], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_first_step_is_at_no_distance_from_the_reference(policy, kind, adapter):
    dropout = "model.config={attention_dropout: 0.2, hidden_dropout: 0.2}"
    few = ("train.max_steps=2", "train.logging_steps=1", "train.beta=0.1", "eval.before=false", "eval.samples=0")
    history = metrics_of(run_recipe(policy(kind, *few, dropout, f"adapter={adapter}")))["history"]
    distances = [entry["kl"] for entry in history if "kl" in entry]
    assert distances[0] == 0.0
    assert abs(distances[1]) > 0


def test_resume_is_bit_equal(policy, tmp_path, interrupted):

    few = ("train.max_steps=4", "train.save_steps=2", "eval.before=false", "eval.samples=0")
    whole = run_recipe(policy("grpo", *few, f"train.output_dir={tmp_path / 'whole'}"))
    halted = policy("grpo", *few, f"train.output_dir={tmp_path / 'halted'}")
    with interrupted():
        run_recipe(halted)
    resumed = run_recipe(halted, resume=True)
    assert_equal_weights(whole, resumed)


def test_prompts_without_room_are_counted_or_refused(policy, capsys):
    run_recipe(policy("grpo", "train.max_completion_length=242"), dry_run=True)
    assert "prompts without room for an answer" in capsys.readouterr().out
    with pytest.raises(UserError, match="None of the"):
        run_recipe(policy("grpo", "train.max_completion_length=254"), dry_run=True)
    with pytest.raises(UserError, match="has positions for 256 tokens"):
        run_recipe(policy("grpo", "train.max_completion_length=256"), dry_run=True)


def test_a_wrong_reward_is_found_when_the_recipe_is_read(policy, tmp_path):
    (tmp_path / "reward.py").write_text("def other(prompts, completions): ...\n", encoding="utf-8")
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    policy_file = f"objective.reward={tmp_path / 'reward.py'}:vowels"
    with pytest.raises(UserError, match=r"objective\.reward.*defines no function 'vowels'; it has other"):
        policy("grpo", policy_file)


def test_rewards_that_tell_nothing_apart_are_named_as_the_cause(policy, tmp_path):
    file = tmp_path / "same.py"
    file.write_text(
        "def same(prompts, completions, **columns):\n    return [0.5] * len(completions)\n", encoding="utf-8"
    )
    alike = (f"objective.reward={file}:same", "train.max_steps=3", "train.save_steps=3", "eval.before=false")
    with pytest.raises(UserError, match="every answer to a prompt gets the same reward"):
        run_recipe(policy("grpo", *alike))
