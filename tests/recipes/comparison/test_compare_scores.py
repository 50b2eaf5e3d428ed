"""Scores of `anyformer eval` in a comparison: which are of the same thing."""

import json

import pytest
from made_runs import write_run

from anyformer.recipes.comparison.collect import compare_runs
from anyformer.recipes.comparison.page import render
from anyformer.recipes.scoring.kinds import Sampling, Settings
from anyformer.recipes.scoring.results import as_dict, write
from anyformer.recipes.scoring.rows import Rows
from anyformer.recipes.scoring.score import Score

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
    assert [(cell.value, cell.low, cell.high) for cell in line.cells] == [(0.25, 0.1, 0.5), (0.375, 0.1, 0.5)]
    assert (line.name, line.data, line.counts, line.apart) == ("exact match", "held out", (4, 4), None)


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
    assert second.cells[0] is None and second.counts == (None, 2) and second.apart is None
