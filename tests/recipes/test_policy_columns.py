"""The rewards of a policy get the columns of the data as they are: of any type and name, always the same."""

import json

import pytest

from anyformer.recipes.run import run_recipe

# Types that no column of Arrow holds together, objects of different keys, and a number that it does not hold at all.
ANSWERS = [3, "three", None, 1.5, True, ["a", 1], {"a": 1}, {"b": [{"c": 2}]}, 10**25, "\ud83d"]
REWARD = """
import json

def mine(prompts, completions, /, *, answer, sometimes, **columns):
    assert set(columns) == {"self", "completions", "row_number"}, list(columns)
    with open(FILE, "a") as out:
        for row in zip(prompts, answer, sometimes, columns["self"]):
            print(json.dumps(row), file=out)
    answer.clear()
    for value in columns["self"]:
        value.clear()
    return [len(text) for text in completions]
"""


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_a_reward_gets_what_the_row_holds(recipe, tmp_path, kind):
    """In training, in the measures and for the samples, whatever it does with them."""
    lines = [
        {"prompt": f"say {n}", "answer": answer, "self": {str(n): n}, "completions": n, "row_number": "r"}
        | ({"sometimes": n} if n % 3 == 0 else {})
        for n, answer in enumerate(ANSWERS * 2)
    ]
    data, seen, file = tmp_path / "data.jsonl", tmp_path / "seen.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    file.write_text(REWARD.replace("FILE", repr(str(seen))), encoding="utf-8")
    common = (
        f"objective={{kind: {kind}, reward: '{file}:mine'}}",
        f"data={{source: {data}, eval_fraction: 0.5}}",
        "~train.max_length",
        "~eval.max_new_tokens",
        "eval.samples=10",
        "train.max_completion_length=3",
        "train.max_steps=2",
        "train.save_steps=2",
        "train.per_device_train_batch_size=8",
    )
    groups = () if kind == "ppo" else ("train.num_generations=4",)
    out = run_recipe(recipe(*common, *groups))
    found = set(seen.read_text(encoding="utf-8").splitlines())
    expected = {json.dumps([line["prompt"], line["answer"], line.get("sometimes"), line["self"]]) for line in lines}
    assert len(found) > len(lines) // 2 and found <= expected
    samples = json.loads((out / "metrics.json").read_text(encoding="utf-8"))["samples_after"]
    shown = {sample["reference"] for sample in samples}
    of_rows = {"3", "three", "", "1.5", "true", '["a", 1]', '{"a": 1}', '{"b": [{"c": 2}]}', str(10**25), r"\ud83d"}
    assert len(shown) > 2 and shown <= of_rows
