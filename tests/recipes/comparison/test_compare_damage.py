"""Folders of runs that go on, were killed, or are damaged."""

import json

import pytest
import typer.testing
from made_runs import write_run

from anyformer.recipes.comparison.collect import compare_runs
from anyformer.scripts.cli import app


def invoke(*arguments):
    return typer.testing.CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.parametrize("missing", ["before", "after"])
@pytest.mark.parametrize("first", [True, False])
def test_rows_of_figures_that_are_not_written_yet(tmp_path, missing, first):
    """A run keeps the rows first, the figures when it has saved the model."""
    whole, cut = write_run(tmp_path / "whole"), write_run(tmp_path / "cut", finished=False)
    metrics = json.loads((cut / "metrics.json").read_text())
    del metrics[missing]
    (cut / "metrics.json").write_text(json.dumps(metrics))
    found = compare_runs([cut, whole] if first else [whole, cut])
    assert "cut is unfinished" in found.remarks[0]
    cells = dict(zip(found.names, found.figures[0].cells, strict=True))
    assert cells["cut"].change is None and getattr(cells["cut"], missing) is None
    other = "before" if missing == "after" else "after"
    assert getattr(cells["cut"], other) is not None and cells["whole"].change is not None
    later = cells["whole" if first else "cut"]
    assert (later.difference is None) == (missing == "after")


SCORE = {"name": "x", "data": "d", "value": 0.5, "low": 0.1, "high": 0.9, "count": 4}


def scores(**values):
    return json.dumps({"scores": [SCORE, SCORE | values]})


def sample(**values):
    return json.dumps({"samples_after": [{"prompt": "p", "reference": "r", "answer": "a"} | values]})


def held(rows, **statistics):
    return json.dumps({"after": {"rows": ["a"], "parts": {"loss": rows}, "statistics": statistics}})


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("recipe.yaml", "objective: sft", "its objective is no section"),
        ("metrics.json", '{"measured": {"shown": 5}}', "measured.shown"),
        ("metrics.json", '{"measured": {"shown": [["loss"]]}}', "measured.shown"),
        ("metrics.json", '{"plan": {"steps": "ten"}}', "plan.steps"),
        ("metrics.json", '{"history": [{"step": "one"}]}', "its history"),
        ("metrics.json", '{"history": [{"step": NaN}]}', "its history"),
        ("metrics.json", sample(prompt=1), "is no text"),
        ("metrics.json", sample(answer=None), "is no text"),
        ("metrics.json", '{"samples_after": 5}', "is damaged"),
        ("scores.json", scores(count=float("inf")), "count of score 2"),
        ("scores.json", scores(count=float("nan")), "count of score 2"),
        ("scores.json", scores(low={}), "low of score 2"),
        ("scores.json", scores(value=None), "value of score 2"),
        ("scores.json", scores(data=["d"]), "data of score 2"),
        ("scores.json", scores(settings=[1]), "settings of score 2"),
        ("scores.json", '{"scores": [1]}', "the values of score 1"),
        ("scores.json", '{"scores": {"a": 1}}', "no list of scores"),
        ("scores.json", "[]", "no list of scores"),
        ("scores.json", "{", "is damaged"),
        ("held_out.json", held([[1, 2, 3]]), "rows of shape (1, 3) make no ratio"),
        ("held_out.json", held([[1, 2], [3, 4]]), "its loss is not of its 1 rows"),
        ("held_out.json", held([[1, 2]], loss="macro_f1"), "rows of shape (1, 2) make no macro_f1"),
        ("held_out.json", held([[1, 2]], loss="median"), "'median' is no statistic that is known"),
    ],
)
def test_what_is_damaged_in_a_run_is_named(tmp_path, file, text, said):
    one, two = (write_run(tmp_path / name) for name in ("one", "two"))
    (two / file).write_text(text)
    done = invoke(one, two)
    assert done.exit_code == 2, done.output
    words = " ".join(done.output.split())
    assert file in words and "is damaged" in words and said in words


@pytest.mark.parametrize("text", ["[]", '{"inputs": [1]}', '{"inputs": {', '{"inputs": "one"}'])
def test_a_damaged_pipeline_is_named(tmp_path, text):
    for name in ("one", "two"):
        write_run(tmp_path / "line" / name)
    (tmp_path / "line/pipeline.json").write_text(text)
    done = invoke(tmp_path / "line")
    assert done.exit_code == 2, done.output
    assert "pipeline.json is damaged" in " ".join(done.output.split())


def test_a_pipeline_that_has_no_inputs_yet_still_has_its_stages(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / "line" / name)
    (tmp_path / "line/pipeline.json").write_text('{"inputs": null}')
    assert compare_runs([tmp_path / "line"]).names == ["one", "two"]


def test_a_comparison_offers_only_what_it_has(tmp_path):
    """--overwrite is of `train`."""
    one, two = (write_run(tmp_path / name) for name in ("one", "two"))
    (two / "metrics.json").write_text('{"before": {"loss": 3.')
    done = invoke(one, two)
    assert done.exit_code == 2 and "--overwrite" not in done.output
    assert "leave its folder out of the comparison" in " ".join(done.output.split())
