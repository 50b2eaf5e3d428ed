"""Recipes on rewards that cannot work, or say what has no effect, are refused when they are read."""

import re

import pytest
from recipe_files import GOOD, fault, write

from anyformer.recipes.loading import load_recipe

TWO = "objective.reward=[pep257, last-number]"
REFUSED = [
    ("train.label_smoothing_factor=0.1", "label_smoothing_factor: is not part of this objective's loss"),
    ("data.truncation=keep_start", "data.truncation: .* train.max_completion_length tokens are left out"),
    ("data.truncation=drop", "data.truncation: has no effect"),
    ("eval.max_new_tokens=9", "eval.max_new_tokens: .* train.max_completion_length allows"),
]
POLICIES = ("grpo", "rloo", "ppo")


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_has_no_effect_on_a_policy_is_refused(kind, given, message):
    assert re.search(message, fault(GOOD, f"objective={{kind: {kind}, reward: pep257}}", given))


@pytest.mark.parametrize("kind", POLICIES)
def test_the_resolved_recipe_of_a_policy_can_be_read_again(kind):
    recipe = load_recipe(write(GOOD), (f"objective={{kind: {kind}, reward: pep257}}", "data.truncation=null"))
    text = recipe.to_yaml()
    assert "truncation" not in text and "max_new_tokens" not in text
    assert load_recipe(write(text, "again.yaml")) == recipe


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_an_adapter_that_changes_the_model_has_no_reference(kind):
    changed = (f"objective={{kind: {kind}, reward: pep257}}", "adapter={kind: lora, init_lora_weights: pissa}")
    found = fault(GOOD, *changed, "train.beta=0.1")
    assert "adapter.init_lora_weights: pissa changes the model before the first step" in found
    assert load_recipe(write(GOOD), (*changed, "train.beta=0.0"))
    assert load_recipe(write(GOOD), (*changed[:1], "adapter={kind: lora}", "train.beta=0.1"))
    if kind == "rloo":  # whose beta is above 0 by default
        assert "pissa changes the model" in fault(GOOD, *changed)


def test_labels_of_a_distillation_are_not_smoothed():
    found = fault(GOOD, "objective={kind: distill, teacher: some/teacher}", "train.label_smoothing_factor=0.1")
    assert "label_smoothing_factor: is not part of this objective's loss" in found


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_each_reward_has_its_weight(kind):
    one = f"objective={{kind: {kind}, reward: pep257}}"
    assert "train.reward_weights: holds 2 weights for one reward" in fault(GOOD, one, "train.reward_weights=[1.0, 2.0]")
    assert "holds 1 weights for 2 rewards" in fault(GOOD, one, TWO, "train.reward_weights=[1.0]")
    assert load_recipe(write(GOOD), (one, TWO, "train.reward_weights=[1.0, 2.0]"))
