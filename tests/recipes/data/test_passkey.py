"""The passkey task: rows as in the paper, the same ones each time, in the lengths that were asked for."""

import re

import pytest
from data_rows import section

from anyformer.recipes.data import load_splits
from anyformer.recipes.data.builtin import passkey
from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import RecipeError, load_recipe

ROW = re.compile(
    r"There is a pass key hidden in this text\. Find it and memorize it\. (.*?)The pass key is ((?:\d )*\d)\. "
    r"Remember it\. \2 is the pass key\. (.*?)What is the pass key\? The pass key is"
)


def of_length(words):
    return section({"path": "passkey", "arguments": {"rows": 60, "words": words}}, eval_fraction=0.2)


def test_a_row_hides_its_key_in_filler_and_asks_for_it():
    filler = " ".join(passkey.FILLER * 20)
    for row in passkey.load(rows=40, words=[48, 120], digits=5).rows:
        before, key, after = ROW.fullmatch(row["prompt"]).groups()
        assert key == row["answer"] and len(key.split()) == 5 and row["completion"] == f" {key}."
        assert (before + after).strip() in filler, "one stretch of the repeated sentences"
        sentences = (before + after).count(".")
        assert row["depth"] == (before.count(".") / sentences if sentences else 0.0)


def test_rows_depend_on_their_arguments_alone():
    one, same, other = (passkey.load(rows=30, seed=seed) for seed in (3, 3, 4))
    assert one.rows == same.rows and one.rows != other.rows
    assert one.groups == [row["answer"] for row in one.rows] and len(set(one.groups)) == 30


def test_lengths_are_those_asked_for():
    words = [len((row["prompt"] + row["completion"]).split()) for row in passkey.load(rows=400, words=[45, 200]).rows]
    assert 45 <= min(words) <= 48 and 195 <= max(words) <= 200
    assert 110 < sum(words) / len(words) < 133  # even between both
    for most in (45, 50, 133):
        found = {len((r["prompt"] + r["completion"]).split()) for r in passkey.load(rows=30, words=most).rows}
        assert max(found) <= most and min(found) > most - 8


def test_depths_are_spread_over_the_whole_text():
    depths = [row["depth"] for row in passkey.load(rows=500, words=300).rows]
    for tenth in range(10):
        assert 25 < sum(tenth / 10 <= depth < (tenth + 1) / 10 + (tenth == 9) for depth in depths) < 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"length": 5}, "has 'length', which is none of rows, words, digits, seed"),
        ({"rows": 0}, "rows must be a whole number of at least 2, found 0"),
        ({"digits": True}, "digits must be a whole number of at least 1, found True"),
        (
            {"words": 20},
            r"words must be at least 45, of which a row without filler consists, and rise: found \[20, 20\]",
        ),
        ({"words": [90, 60]}, "and rise: found"),
        ({"words": "long"}, "words must be a number, or two"),
        ({"rows": 2000, "digits": 3}, "rows=2000: 3 digits make 1,000 keys; raise digits"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_their_place(tmp_path, arguments, said):
    with pytest.raises(UserError, match=said):
        passkey.load(**{"rows": 5} | arguments) if "length" not in arguments else _raise(arguments)
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model: {preset: mini-llama, tokenizer: 'builtin:bytes'}\nobjective: {kind: sft}\n"
        f"data:\n  source: {{path: passkey, arguments: {arguments}}}\n",
        encoding="utf-8",
    )
    with pytest.raises(
        RecipeError, match=rf"recipe.yaml:4: data.source: has arguments that passkey cannot take: .*{said}"
    ):
        load_recipe(file)


def _raise(arguments):
    raise UserError(passkey.problem(arguments))


def test_other_data_sets_take_no_arguments(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model: {preset: mini-llama, tokenizer: 'builtin:bytes'}\nobjective: {kind: pretrain}\n"
        "data: {source: {path: stdlib-text, arguments: {rows: 3}}}\n",
        encoding="utf-8",
    )
    with pytest.raises(RecipeError, match="has arguments, which goes with a Python function, or passkey, only"):
        load_recipe(file)


def test_no_key_is_on_both_sides_and_lengths_may_mix():
    long, short = load_splits(of_length(200)), load_splits(of_length([50, 60]))
    held = [{row["answer"] for row in splits.eval} for splits in (long, short)]
    trained = [{row["answer"] for row in splits.train} for splits in (long, short)]
    assert held[0] and held[0] == held[1] and not held[0] & (trained[0] | trained[1])
    sources = [{"path": "passkey", "arguments": {"rows": 20, "words": words}} for words in (50, 90)]
    mixed = load_splits(section(sources, eval_fraction=0.2))
    lengths = {len(row["prompt"].split()) // 30 for row in mixed.train}
    assert len(lengths) > 1 and mixed.report.rows_read == 40
    again = [sources[0], sources[0]]
    with pytest.raises(UserError, match=r"passkey is named in data\.source\.0 already"):
        load_splits(section(again, eval_fraction=0.2))
