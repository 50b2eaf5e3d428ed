"""Recipes on rewards that cannot work, or say what has no effect, are refused when they are read."""

import re

import pytest
from recipe_files import GOOD, fault, faults, write

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


GROUPS = [
    ("train.beta=-1", "must be at least 0"),
    ("train.temperature=0", "must be greater than 0"),
    ("train.max_completion_length=0", "must be at least 1"),
    ("train.seed=99999999999999", "must be at most 4294967295"),
]
GRPO = [
    ("train.epsilon=-1", "must be greater than 0"),
    ("train.num_generations=0", "must be at least 2"),
    ("train.num_generations=1", "must be at least 2"),
    ("train.top_k=-5", "must be at least 0"),
    ("train.top_p=0", "must be greater than 0"),
    ("train.ref_model_sync_steps=0", "must be at least 1"),
]
CHOICES = [
    ("train.loss_type=foo", "grpo, dr_grpo, dapo, bnpo, cispo, sapo, luspo or vespo"),
    ("train.importance_sampling_level=word", "token or sequence"),
    ("train.multi_objective_aggregation=sum", "sum_then_normalize or normalize_then_sum"),
    ("train.scale_rewards=all", "group, batch or none"),
]
PPO = [
    ("train.cliprange=0", "must be greater than 0"),
    ("train.num_ppo_epochs=0", "must be at least 1"),
    ("train.lam=2", "must be at most 1"),
    ("train.kl_target=-1", "must be greater than 0"),
]
WRONG = [(kind, *case) for kind in POLICIES for case in GROUPS]
WRONG += [(kind, *case) for kind in ("grpo", "rloo") for case in GRPO]
WRONG += [("grpo", *case) for case in CHOICES] + [("ppo", *case) for case in PPO]


@pytest.mark.parametrize(("kind", "given", "message"), WRONG)
def test_values_out_of_range_are_refused_when_the_recipe_is_read(kind, given, message):
    found = fault(GOOD, f"objective={{kind: {kind}, reward: pep257}}", given)
    assert f"{given.partition('=')[0]}: " in found and message in found


def test_values_at_the_limits_are_taken():
    kept = ("train.loss_type=luspo", "train.beta=0", "train.top_k=0", "train.scale_rewards=false", "train.min_p=null")
    assert load_recipe(write(GOOD), ("objective={kind: grpo, reward: pep257}", *kept, "train.seed=4294967295"))
    assert load_recipe(write(GOOD), ("objective={kind: ppo, reward: pep257}", "train.kl_target=null"))


@pytest.mark.parametrize(
    ("objective", "key", "message"),
    [
        ("{kind: grpo, reward: pep527}", "num_generations", "did you mean pep257"),
        ("{kind: grpo}", "num_generations", "reward"),
        ("{kind: distill}", "lmbda", "teacher"),
        ("{kind: gpro, reward: pep257}", "num_generations", "grpo"),
        ("grpo", "num_generations", "write objective: {kind: grpo}"),
    ],
)
def test_a_faulty_objective_does_not_make_its_train_keys_unknown(objective, key, message):
    value = "1.0" if key == "lmbda" else "4"
    found = fault(GOOD, f"objective={objective}", f"train.{key}={value}")
    assert "objective" in found and message in found


def test_the_train_section_beside_a_faulty_objective_is_checked_all_the_same():
    lines = faults(GOOD, "objective={kind: grpo, reward: pep527}", "train.num_generation=4", "train.beta=-1")
    said = "\n".join(lines)
    assert len(lines) == 3 and "did you mean 'num_generations'" in said and "at least 0" in said
