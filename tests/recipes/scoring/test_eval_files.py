"""`anyformer eval` and the file of its figures: what each figure keeps, and what is refused before a model opens."""

import json

import numpy as np
import pytest
from eval_models import TEXTS, write_rows
from typer.testing import CliRunner

from anyformer.recipes.errors import UserError
from anyformer.recipes.scoring import perplexity, results, run
from anyformer.recipes.scoring.kinds import Settings
from anyformer.recipes.scoring.meter import counted
from anyformer.recipes.scoring.run import evaluate
from anyformer.recipes.scoring.score import Score
from anyformer.scripts.cli import app


@pytest.fixture
def texts(tmp_path):
    return write_rows(tmp_path / "texts.jsonl", TEXTS)


@pytest.fixture
def unopened(monkeypatch):
    """No model may be opened."""
    monkeypatch.setattr(run, "open_subject", lambda *given, **options: pytest.fail("a model was opened"))


def refused(*command):
    done = CliRunner().invoke(app, ["eval", *map(str, command)])
    assert done.exit_code == 2 and "Traceback" not in done.output, done.output
    return done.stderr


def test_each_figure_keeps_its_own_settings(tiny_checkpoint, texts, tmp_path, monkeypatch):
    other, file = write_rows(tmp_path / "other.jsonl", TEXTS[:2]), tmp_path / "scores.json"
    for on, context, version in ((texts, 16, "1"), (other, 8, "2")):
        monkeypatch.setattr(results, "versions", lambda version=version: {"anyformer": version})
        settings = Settings(context=context)
        evaluate(str(tiny_checkpoint), str(on), settings=settings, output=file, tell=lambda text: None)
    stored = json.loads(file.read_text(encoding="utf-8"))
    found = {
        (score["data"], score["settings"]["on"], score["settings"]["context"], score["versions"]["anyformer"])
        for score in stored["scores"]
    }
    assert found == {(str(texts), str(texts), 16, "1"), (str(other), str(other), 8, "2")}
    assert {score["model"] for score in stored["scores"]} == {str(tiny_checkpoint)}
    assert stored.keys() == {"scores", "data"}


def test_figures_of_earlier_versions_take_no_settings_of_a_later_call(tmp_path):
    file = tmp_path / "scores.json"
    old = {"name": "F1", "value": 0.5, "low": None, "high": None, "count": 2, "better": "higher", "data": "a"}
    data = {"a": {"digest": "x", "rows": 2, "remarks": []}}
    file.write_text(json.dumps({"scores": [old], "data": data, "settings": {"limit": 1}, "model": "m"}))
    assert results.write(file, {"scores": [], "data": {}}) == {"scores": [old], "data": data}


FOREIGN = [
    '[{"text": "x"}]',
    "[]",
    "{}",
    "3",
    '{"scores": [{"x": 1}], "data": {}}',
    '{"scores": [], "data": []}',
    '{"scores": []}',
    '{"scores": [], "data": {"held out": {"rows": 3}}}',
]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_file_of_another_shape_is_refused_before_a_model_is_opened(tiny_checkpoint, texts, tmp_path, unopened, text):
    file = tmp_path / "scores.json"
    file.write_text(text)
    for asked in (("--on", texts), ("--tasks", "anyformer_text")):
        if asked[0] == "--tasks":
            pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install lm_eval")
        assert "holds no scores" in refused(tiny_checkpoint, *asked, "--output", file)
    assert file.read_text() == text


@pytest.mark.parametrize("text", ["", '{"scores": [', '{"scores": [], "data": {}, "more": NaN}'])
def test_a_damaged_file_is_refused_before_a_model_is_opened(tiny_checkpoint, texts, tmp_path, unopened, text):
    file = tmp_path / "scores.json"
    file.write_text(text)
    assert "is damaged: remove it" in refused(tiny_checkpoint, "--on", texts, "--output", file)


def test_a_place_that_cannot_be_written_is_refused_before_a_model_is_opened(tiny_checkpoint, texts, tmp_path, unopened):
    assert "cannot be read: Is a directory" in refused(tiny_checkpoint, "--on", texts, "--output", tmp_path)
    below = texts / "scores.json"
    assert "cannot be written: Not a directory" in refused(tiny_checkpoint, "--on", texts, "--output", below)
    deep = tmp_path / "not" / "there" / "scores.json"
    results.check_file(deep)
    assert not (tmp_path / "not").exists()


def test_figures_are_printed_though_the_file_cannot_be_written(tiny_checkpoint, texts, tmp_path, monkeypatch):
    def full(file, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "write_text", full)
    command = ["eval", str(tiny_checkpoint), "--on", str(texts), "--output", str(tmp_path / "scores.json")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and "cannot be written: No space left on device" in done.stderr
    assert "perplexity per byte" in done.stdout


def test_windows_that_make_no_sense_are_refused_before_a_model_is_opened(tiny_checkpoint, texts, unopened):
    for metrics in ((), ("--metrics", "perplexity")):
        given = (tiny_checkpoint, "--on", texts, *metrics)
        assert "--context: is 1: a window holds" in refused(*given, "--context", 1)
        assert "--stride: is 16: it must be below the 16" in refused(*given, "--context", 16, "--stride", 16)


def test_a_perplexity_beyond_the_largest_number_is_left_out_and_told():
    told = []
    # Per token exp(2), per word exp(800), which no number holds, per byte exp(0.5).
    found = perplexity._scores(np.array([[800.0, 400, 1, 1600]]), "perplexity", True, told.append)
    assert {score.name: score.value for score in found} == {
        "perplexity per token": pytest.approx(np.exp(2)),
        "perplexity per byte": pytest.approx(np.exp(0.5)),
    }
    assert told == ["perplexity per word: left out: exp(800.0 nats) is beyond the largest number"]


def test_a_model_whose_perplexity_no_number_holds_is_told(tiny_checkpoint, texts, monkeypatch):
    real = perplexity._scores
    monkeypatch.setattr(perplexity, "_scores", lambda figures, *rest: real(figures * [1e9, 1, 1, 1], *rest))
    with pytest.raises(UserError, match="beyond the largest number"):
        evaluate(str(tiny_checkpoint), str(texts), tell=lambda text: None)


def test_one_of_a_thing_is_singular(tiny_checkpoint, tmp_path):
    on, told = write_rows(tmp_path / "one.jsonl", [{"text": "x"}]), []
    evaluate(str(tiny_checkpoint), str(on), tell=told.append)
    assert told[0].startswith("perplexity: 1 window, ")
    assert (counted(0, "row"), counted(1, "row"), counted(1200, "row")) == ("0 rows", "1 row", "1,200 rows")


def test_figures_of_tasks_that_are_no_numbers_are_left_out_and_told(tiny_checkpoint, tmp_path, monkeypatch):
    """The others are not lost by them."""

    def score(name, value):
        details = {"task": "t", "version": 1, "num_fewshot": 0}
        return Score(name, value, float("nan"), float("nan"), 3, details=details)

    given = [score("t byte_perplexity", float("inf")), score("t acc", 0.5)]
    monkeypatch.setattr(run, "require_harness", lambda: None)
    monkeypatch.setattr(run, "run_harness", lambda *model, **options: given)
    file = tmp_path / "scores.json"
    command = ["eval", str(tiny_checkpoint), "--tasks", "t", "--output", str(file)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert [entry["name"] for entry in stored["scores"]] == ["t acc"]
    said = "t byte_perplexity is left out: lm-evaluation-harness gives inf"
    assert stored["data"]["lm-eval:t"]["remarks"] == [said] and said in done.stderr
    given.pop()
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and said in done.output
