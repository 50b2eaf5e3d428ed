"""Runs on several sources, on streams and on a function: the recipe's keys reach the data and back."""

import json

import pytest

from anyformer.recipes.data import RowStream
from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe


def messages_file(folder, count=12):
    path = folder / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "one two"}]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_recipe_keeps_its_sources(recipe, rows, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    lines = [json.dumps({"q": f"tally {i}", "completion": "five six"}) for i in range(48)]
    other.write_text("\n".join(lines), encoding="utf-8")
    read = recipe(f"data.source=[{{path: {rows}, weight: 2, max_rows: 20}}, {{path: {other}, columns: {{prompt: q}}}}]")
    assert read.data.source == [
        {"path": str(rows), "weight": 2, "max_rows": 20},
        {"path": str(other), "columns": {"prompt": "q"}},
    ]
    saved = tmp_path / "saved.yaml"
    saved.write_text(read.to_yaml(), encoding="utf-8")
    assert load_recipe(saved) == read
    run_recipe(read, dry_run=True)
    printed = " ".join(capsys.readouterr().out.split())
    mixture = prepare(read).splits.mixture
    assert mixture is not None and mixture.sizes == [20, 38] and mixture.rows_per_epoch == [39, 19]
    assert "rows.jsonl: prompt and completion; 25 rows read, 20 to train on, 5 held out, 39 an epoch" in printed
    assert "48 rows read, 38 to train on, 10 held out, 19 an epoch" in printed


@pytest.mark.parametrize("overrides", [("data.streaming=true",), ("data.streaming=true", "objective=pretrain")])
def test_a_stream_trains_as_rows_in_memory_do(recipe, rows, tmp_path, overrides):
    if "objective=pretrain" in overrides:
        texts = tmp_path / "texts.jsonl"
        texts.write_text(
            "".join(json.dumps({"text": f"one two three four number {i}"}) + "\n" for i in range(60)), encoding="utf-8"
        )
        overrides = (*overrides, f"data.source={texts}", "~train.max_length", "objective={kind: pretrain}")[1:]
        overrides = ("data.streaming=true", *overrides)
    read = recipe(*overrides, "train.max_steps=4")
    prepared = prepare(read)
    assert isinstance(prepared.splits.train, RowStream) and prepared.splits.eval
    assert prepared.train.report.rows == len(prepared.splits.train)
    assert prepared.data_digest == prepare(read).data_digest
    folder = run_recipe(read)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["after"]["loss"] < metrics["before"]["loss"]
    assert metrics["data_digest"] == prepared.data_digest


def test_a_changed_function_is_other_data(recipe, tmp_path, interrupted):
    code = tmp_path / "mine.py"
    body = "def rows():\n    return [{'prompt': f'count {i}', 'completion': 'one two'} for i in range(40)]\n"
    code.write_text(body, encoding="utf-8")
    read = recipe(f"data.source={code}:rows")
    with interrupted():
        run_recipe(read)
    code.write_text(body + "# the same rows\n", encoding="utf-8")
    with pytest.raises(UserError, match="the rows differ from those that"):
        run_recipe(read, resume=True)
    code.write_text(body, encoding="utf-8")
    run_recipe(read, resume=True)


def test_a_run_does_not_write_into_its_data(recipe, rows, tmp_path):
    read = recipe(f"data.source={{path: {tmp_path}}}")
    with pytest.raises(UserError, match=r"lies in the folder .*, all of which is read as data"):
        run_recipe(read)
    held = tmp_path / "run"
    held.mkdir()
    messages_file(held)
    with pytest.raises(UserError, match=r"holds .*chats\.jsonl, which the run reads"):
        run_recipe(recipe(f"data.source=[{rows}, {{path: {held / 'chats.jsonl'}}}]"))


def test_conversations_of_two_forms_train_together(recipe, tmp_path):
    chats = messages_file(tmp_path)
    alpaca = tmp_path / "alpaca.jsonl"
    lines = [json.dumps({"instruction": f"say {i}", "output": "three"}) for i in range(12)]
    alpaca.write_text("\n".join(lines), encoding="utf-8")
    prepared = prepare(recipe(f"data.source=[{chats}, {alpaca}]"))
    assert prepared.train.report.rows_kept == 20 and prepared.held_out is not None
    assert prepared.held_out.report.rows_kept == 4  # two of each source
    samples = prepared.objective.preview(prepared.train, 20)
    assert "⟦one two" in samples[0] and "⟦three" in samples[-1]


def test_a_stream_of_sources_with_weights_trains(recipe, rows, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(
        "\n".join(json.dumps({"prompt": f"tally {i}", "completion": "five six"}) for i in range(60)), encoding="utf-8"
    )
    sources = f"data.source=[{{path: {rows}, weight: 3}}, {{path: {other}, weight: 1}}]"
    read = recipe(sources, "data.streaming=true", "train.max_steps=4")
    prepared = prepare(read)
    assert prepared.train.report.rows == len(prepared.splits.train)
    metrics = json.loads((run_recipe(read) / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["after"]["loss"] < metrics["before"]["loss"]
