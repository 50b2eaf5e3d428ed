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


def with_reward(policy, tmp_path, kind, text, *overrides):
    """A recipe whose reward is the function `mine` of a file with this text."""
    file = tmp_path / "mine.py"
    file.write_text(text, encoding="utf-8")
    groups = ("~train.num_generations",) if kind == "ppo" else ()
    return policy(kind, f"objective.reward={file}:mine", *groups, *overrides)


def no_weights(monkeypatch):
    monkeypatch.setattr("anyformer.recipes.models.load_model", lambda *given, **named: pytest.fail("weights loaded"))


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_a_column_that_the_data_lack_is_found_before_a_weight_is_loaded(policy, tmp_path, monkeypatch, kind):
    no_weights(monkeypatch)
    text = "def mine(prompts, completions, *, answer, **columns):\n    return [1.0] * len(completions)\n"
    with pytest.raises(UserError, match=r"mine\.py:mine: needs the column 'answer'.*they have: completion"):
        run_recipe(with_reward(policy, tmp_path, kind, text))


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_a_reward_model_is_looked_at_before_a_weight_is_loaded(policy, tiny_checkpoint, tmp_path, monkeypatch, kind):
    no_weights(monkeypatch)
    groups = ("~train.num_generations",) if kind == "ppo" else ()
    for reward, message in ((tiny_checkpoint, "is no reward model"), (tmp_path / "none", "neither a local folder")):
        with pytest.raises(UserError, match=rf"objective\.reward .*{message}"):
            run_recipe(policy(kind, f"objective.reward=[pep257, {reward}]", *groups))


NAMED = """
import json

def mine(prompts, completions, *, completion, image, completion_ids, chosen, **columns):
    assert not columns.keys() - {"rejected", "prompt_ids"}, list(columns)
    assert columns["prompt_ids"] == image == ["kept"] * len(prompts)
    with open(FILE, "a") as out:
        for row in zip(prompts, completion, completion_ids, chosen, columns["rejected"]):
            print(json.dumps(row), file=out)
    return [len(text) for text in completions]
"""


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_a_reward_gets_all_columns_whatever_their_names(policy, tmp_path, rows, kind):
    """In training, in the measures and for the samples."""
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    names = ("completion_ids", "chosen", "rejected")
    for number, line in enumerate(lines):
        line |= {name: f"{name} {number}" for name in names} | {"prompt_ids": "kept", "image": "kept"}
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    seen = tmp_path / "seen.jsonl"
    few = ("train.max_steps=1", "train.max_completion_length=3", "data.format=prompt", "eval.samples=0")
    run_recipe(with_reward(policy, tmp_path, kind, NAMED.replace("FILE", repr(str(seen))), *few))
    expected = {tuple(line[name] for name in ("prompt", "completion", *names)) for line in lines}
    found = {tuple(json.loads(line)) for line in seen.read_text(encoding="utf-8").splitlines()}
    assert len(found) > 6 and found <= expected


def test_reference_and_reward_models_are_in_the_plan(policy, tiny, tiny_checkpoint, tmp_path):
    from transformers import AutoTokenizer

    from anyformer.recipes.prepare import prepare

    judge = tiny(vocab_size=291, head="sequence_classification", num_labels=1)
    judge.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(tmp_path / "judge")
    judged = f"objective.reward=[pep257, {tmp_path / 'judge'}]"

    def memory(kind, *overrides):
        groups = ("~train.num_generations",) if kind == "ppo" else ()
        plan = prepare(policy(kind, judged, *groups, *overrides)).plan
        assert plan.memory["reward models"] == 4 * judge.num_parameters()
        return plan.memory.get("reference", 0) // 4, plan

    reference, plan = memory("rloo", "adapter={kind: none}")
    assert reference == sum(plan.parameters.values()) > 0
    assert memory("grpo", "adapter={kind: none}")[0] == 0  # beta is 0
    assert memory("rloo")[0] == 0  # the model without its fresh adapter
    reference, plan = memory("ppo")
    assert reference == plan.trainable > 0
