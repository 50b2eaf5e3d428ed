"""Scores of `anyformer eval` in a comparison: which are of the same thing."""

import json

import numpy as np
import pytest
from made_runs import write_run

from anyformer.recipes.comparison.collect import compare_runs
from anyformer.recipes.comparison.figures import Estimate
from anyformer.recipes.comparison.page import render
from anyformer.recipes.comparison.wording import score_in_words
from anyformer.recipes.errors import UserError
from anyformer.recipes.scoring.kinds import Sampling, Settings
from anyformer.recipes.scoring.results import as_dict, write
from anyformer.recipes.scoring.rows import Rows
from anyformer.recipes.scoring.score import Score
from anyformer.recipes.scoring.score_rows import check_rows_file, keep_rows
from anyformer.recipes.scoring.statistics import ByRow

ROWS = [{"prompt": f"{at}", "completion": "x"} for at in range(4)]


def lines_of(tmp_path, *evaluations):
    """The lines of a comparison of runs, a, b and so on, each with a `scores.json` of such content."""
    folders = [write_run(tmp_path / name) for name in "abc"[: len(evaluations)]]
    for folder, found in zip(folders, evaluations, strict=True):
        (folder / "scores.json").write_text(json.dumps(found))
    return compare_runs(folders).scores


def evaluation(name="exact match", *, value=0.25, count=4, rows=ROWS, settings=None):
    """As `eval` writes it, with the settings in each score."""
    by = (settings or Settings()).as_dict()
    found = as_dict("m", Rows("held out", "prompt-completion", rows), [Score(name, value, 0.1, 0.5, count)], by)
    return found | {"scores": [score | {"settings": by} for score in found["scores"]]}


def test_scores_stand_beside_each_other(tmp_path):
    (line,) = lines_of(tmp_path, evaluation(), evaluation(value=0.375))
    estimates = [cell.estimate for cell in line.cells]
    assert [(each.value, each.low, each.high) for each in estimates] == [(0.25, 0.1, 0.5), (0.375, 0.1, 0.5)]
    assert (line.name, line.data, line.apart) == ("exact match", "held out", None)
    assert [(cell.count, cell.difference) for cell in line.cells] == [(4, None)] * 2  # which keep no rows


def test_other_counts_are_told(tmp_path):
    (line,) = lines_of(tmp_path, evaluation(), evaluation(count=3))
    assert line.apart == "not of the same data: 3 and 4 counted"


def test_as_many_other_rows_are_told(tmp_path):
    """Two runs' own held-out rows have one name."""
    other = evaluation(rows=[*ROWS[:3], {"prompt": "5", "completion": "x"}])
    (line,) = lines_of(tmp_path, evaluation(), other, evaluation())
    assert line.apart == "not of the same data: other rows in a, c than in b"
    folders = [tmp_path / name for name in "abc"]
    assert line.apart in render(compare_runs(folders))
    assert compare_runs(folders).as_dict()["scores"][0]["apart"] == line.apart


def test_rows_that_are_not_known_are_told(tmp_path):
    (line,) = lines_of(tmp_path, evaluation(), evaluation() | {"data": {}})
    assert line.apart == "perhaps not of the same data: which rows they are of is not kept by b"


@pytest.mark.parametrize(
    ("name", "settings", "apart"),
    [
        ("exact match", Settings(max_new_tokens=8), "max_new_tokens is 256 in a and 8 in b"),
        ("win rate over the data by pep257", Settings(max_new_tokens=8), "max_new_tokens is 256 in a and 8 in b"),
        ("perplexity per byte", Settings(context=64, stride=16), "context is not set in a and 64 in b; stride is not"),
        ("pseudo-perplexity per token", Settings(stride=8), "stride is not set in a and 8 in b"),
        ("pass@1", Settings(sampling=Sampling(temperature=0.2)), "sampling.temperature is not set in a and 0.2 in b"),
        ("pass@1", Settings(sampling=Sampling(samples=3)), "sampling.samples is 1 in a and 3 in b"),
        # What the figure does not depend on.
        ("exact match", Settings(batch_size=2, context=64, stride=16), None),
        ("perplexity per byte", Settings(max_new_tokens=8, rows="packed"), None),
        ("pass@1", Settings(sampling=Sampling(k=(1, 3), seed=5, allow_code=True)), None),
        ("accuracy", Settings(max_new_tokens=8, context=64, rows="packed"), None),
    ],
)
def test_other_settings_are_told(tmp_path, name, settings, apart):
    (line,) = lines_of(tmp_path, evaluation(name), evaluation(name, settings=settings))
    if apart is None:
        assert line.apart is None
    else:
        assert line.apart.startswith(f"not measured alike: {apart}")


def test_settings_that_are_not_known_are_told(tmp_path):
    """Those of a whole file are of its last evaluation alone."""
    old = evaluation()
    del old["scores"][0]["settings"]
    (line,) = lines_of(tmp_path, evaluation(), old)
    assert line.apart == "perhaps not measured alike: max_new_tokens not kept by b"


def test_labels_need_no_settings(tmp_path):
    old = evaluation("accuracy")
    del old["scores"][0]["settings"]
    assert lines_of(tmp_path, old, old)[0].apart is None


def test_what_eval_writes_has_digests(tmp_path):
    """Through the file's own writer, with other rows under the same name."""
    folders = [write_run(tmp_path / name) for name in "ab"]
    for folder in folders:
        write(folder / "scores.json", evaluation("accuracy"))
    write(folders[1] / "scores.json", evaluation("accuracy", rows=ROWS[:2], count=2))
    first, second = compare_runs(folders).scores
    assert first.apart is None and None not in first.cells
    assert second.cells[0] is None and second.cells[1].count == 2 and second.apart is None


# Differences


def measured(folder, by_row, name="exact match", **of):
    """A run that `eval` has measured, through its own writers."""
    if not folder.exists():
        write_run(folder)
    rows = Rows(of.pop("on", "held out"), "prompt-completion", of.pop("data", ROWS))
    settings = of.pop("settings", Settings())
    scores = [Score.of(name, by_row, **of)]
    found = as_dict("m", rows, scores, settings.as_dict())
    keep_rows(folder, write(folder / "scores.json", found), found, scores)
    return folder


def test_scores_of_the_same_rows_are_subtracted_in_pairs(tmp_path):
    rng = np.random.default_rng(0)
    data = [{"prompt": f"{at}", "completion": "x"} for at in range(60)]
    hard, gain = rng.normal(0, 5, 60), rng.normal(1, 0.2, 60)
    tables = [ByRow(np.stack([hard + 20 + by, np.full(60, 4.0)], 1), "exp_ratio") for by in (0, gain)]
    folders = [
        measured(tmp_path / name, table, "perplexity per byte", data=data, better="lower")
        for name, table in zip("ab", tables, strict=True)
    ]
    (line,) = compare_runs(folders).scores
    first, second = line.cells
    assert first.difference is None and second.against == "a"
    assert second.difference.value == pytest.approx(second.estimate.value - first.estimate.value)
    assert 0 < second.difference.low < second.difference.value < second.difference.high
    assert second.difference.high - second.difference.low < 0.3 * (second.estimate.high - second.estimate.low)
    assert score_in_words(line, second).endswith("against a: worse")
    assert "against a" in render(compare_runs(folders)) and "worse" in render(compare_runs(folders))
    told = compare_runs(folders).as_dict()["scores"][0]["runs"]["b"]
    assert told["value"] == second.estimate.value and told["difference"]["low"] == second.difference.low


def test_an_earlier_evaluation_is_not_subtracted(tmp_path):
    folders = [measured(tmp_path / name, ByRow.of_values([1, 0, 0, 1])) for name in "ab"]
    assert compare_runs(folders).scores[0].cells[1].difference.value == 0
    found = evaluation(value=0.25)
    write(folders[1] / "scores.json", found)  # whose rows are not kept
    (line,) = compare_runs(folders).scores
    assert line.apart is None and [cell.difference for cell in line.cells] == [None, None]


def test_other_rows_or_other_tokens_are_not_subtracted(tmp_path):
    values = ByRow.of_values([1, 0, 0, 1])
    one = measured(tmp_path / "one", values)
    other = measured(tmp_path / "other", values, data=[{"prompt": "5", "completion": "x"}] * 4)
    (line,) = compare_runs([one, other]).scores
    assert line.apart and line.cells[1].difference is None
    tables = [ByRow(np.array([[2.0, 4 + by], [3, 5], [1, 2], [4, 4]]), "exp_ratio") for by in (0, 1)]
    folders = [
        measured(tmp_path / name, table, "perplexity per token", better="lower")
        for name, table in zip("ab", tables, strict=True)
    ]
    (line,) = compare_runs(folders).scores
    assert line.apart == "not measured alike: the rows have other tokens" and line.cells[1].difference is None


def test_scores_without_all_rows_or_with_very_many_numbers_keep_none(tmp_path, monkeypatch):
    for table in (ByRow.of_values([1, 0, 0]), ByRow(np.array([[np.inf, 1.0], [1, 1], [1, 1], [1, 1]]))):
        folder = write_run(tmp_path / str(len(table.rows)))
        scores = [Score("exact match", 0.5, 0.1, 0.9, len(table.rows), by_row=table)]
        found = as_dict("m", Rows("held out", "text", ROWS), scores, {})
        keep_rows(folder, found, found, scores)
        assert json.loads((folder / "scores_rows.json").read_text()) == {}
    monkeypatch.setattr("anyformer.recipes.scoring.score_rows.MOST_NUMBERS", 7)
    folder = measured(tmp_path / "many", ByRow.of_values([1, 0, 0, 1]))
    assert json.loads((folder / "scores_rows.json").read_text()) == {}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"d": {"x": 1}}',
        '{"d": {"x": {"statistic": "median", "rows": [[1, 1]]}}}',
        '{"d": {"x": {"statistic": "ratio", "rows": [[1, 1], [1]]}}}',
        '{"d": {"x": {"statistic": "ratio", "rows": []}}}',
        '{"d": {"x": {"statistic": "ratio", "rows": [["1", 1]]}}}',
        '{"d": {"x": {"statistic": "chrf", "rows": [[1, 1, 1]]}}}',
        '{"d": {"x": {"statistic": "ratio", "rows": [[NaN, 1]]}}}',
        '{"d": {"x": {"statistic": "ratio", "rows": [[1e999, 1]]}}}',
    ],
)
def test_damaged_rows_of_scores_are_named_and_measured_anew(tmp_path, text):
    values = ByRow.of_values([1, 0, 0, 1])
    folders = [measured(tmp_path / name, values) for name in "ab"]
    (folders[1] / "scores_rows.json").write_text(text)
    for reading in (compare_runs, lambda folders: check_rows_file(folders[1])):
        with pytest.raises(UserError, match=r"scores_rows\.json is damaged .*run `anyformer eval` again"):
            reading(folders)
    (folders[1] / "scores_rows.json").unlink()
    measured(folders[1], values)
    assert compare_runs(folders).scores[0].cells[1].difference.value == 0


def test_stages_of_pipelines_are_held_against_their_counterparts(tmp_path):
    for line in "ab":
        for stage in ("one", "two"):
            measured(tmp_path / line / stage, ByRow.of_values([1, 0, 0, line == "b"]))
        (tmp_path / line / "pipeline.json").write_text(json.dumps({"inputs": {"one": {}, "two": {"one": "x"}}}))
    found = compare_runs([tmp_path / "a", tmp_path / "b"])
    assert found.names == ["a/one", "a/two", "b/one", "b/two"]
    against = [None, "a/one", "a/one", "a/two"]
    assert [cell.against for cell in found.figures[0].cells] == against
    assert [cell.against for cell in found.scores[0].cells] == against
    assert [cell.difference and cell.difference.value for cell in found.scores[0].cells] == [None, 0, 0.25, 0.25]


def test_runs_are_subtracted_from_those_that_are_alike(tmp_path):
    """What a third run measured otherwise, or on rows of its own, takes nothing from two others."""
    values, more = ByRow.of_values([1, 0, 0, 1]), ByRow.of_values([1, 1, 0, 1])
    names = {"a": values, "c": values, "b": more}
    folders = [
        measured(tmp_path / name, of, settings=Settings(max_new_tokens=8) if name == "c" else Settings())
        for name, of in names.items()
    ]
    (line,) = compare_runs(folders).scores
    assert line.apart and [cell.against for cell in line.cells] == [None, None, "a"]
    assert line.cells[2].difference.value == 0.25
    other = [{"prompt": f"other {at}", "completion": "x"} for at in range(4)]
    stages = [
        measured(tmp_path / line / stage, values, data=ROWS if stage == "one" else other)
        for line in "pq"
        for stage in ("one", "two")
    ]
    (line,) = compare_runs(stages).scores
    assert [cell.against for cell in line.cells] == [None, None, "p/one", "p/two"]


def test_rows_belong_to_one_evaluation(tmp_path):
    """Data of one digest under two names, as equally good answers of other settings; and a score without its rows."""
    values, others = ByRow.of_values([1, 0, 0, 1]), ByRow.of_values([0, 1, 1, 0])
    folders = [measured(tmp_path / name, values, on="x") for name in "ab"]
    measured(folders[1], others, on="copy/x")
    line = next(line for line in compare_runs(folders).scores if line.data == "x")
    assert line.cells[1].difference == Estimate(0.0, 0.0, 0.0)
    scores = [Score("exact match", 0.5, 0.1, 0.9, 4)]
    found = as_dict("m", Rows("x", "prompt-completion", ROWS), scores, Settings().as_dict())
    keep_rows(folders[1], write(folders[1] / "scores.json", found), found, scores)
    line = next(line for line in compare_runs(folders).scores if line.data == "x")
    assert line.apart is None and line.cells[1].difference is None
    assert len(json.loads((folders[1] / "scores_rows.json").read_text())) == 1  # that of the copy


def test_other_numbers_of_labels_or_classes_are_told(tmp_path):
    folders = []
    for name, count in (("a", 9), ("b", 8)):
        table = ByRow(np.array([[1.0, 2], [2, 2], [1, 3], [0, 2 - (count == 8)]]))
        folders.append(measured(tmp_path / name, table, "token accuracy", details={"labels": count}))
    (line,) = compare_runs(folders).scores
    assert "other numbers of labels" in line.apart and line.cells[1].difference is None
    folders = [
        measured(tmp_path / str(count), ByRow(np.ones((4, 3 * count)), "macro_f1"), "macro F1") for count in (2, 3)
    ]
    (line,) = compare_runs(folders).scores
    assert "other numbers of classes" in line.apart and line.cells[1].difference is None


def test_figures_of_sacrebleu_stand_by_themselves_without_it(tmp_path, monkeypatch):
    table = ByRow(np.ones((4, 10)), "bleu")
    folders = [measured(tmp_path / name, table, "BLEU", bounds=(0.1, 0.2)) for name in "ab"]
    assert compare_runs(folders).scores[0].cells[1].difference is not None
    monkeypatch.setattr("anyformer.recipes.scoring.score_rows.find_spec", lambda name: None)
    assert compare_runs(folders).scores[0].cells[1].difference is None
