"""The verb `compare`, on real small runs and on folders of all kinds."""

import json
import shutil

import numpy as np
import pytest
import torch
import typer.testing

from anyformer.recipes.comparison.collect import compare_runs
from anyformer.recipes.comparison.show import show_comparison
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.run import run_recipe
from anyformer.scripts.cli import app

ROWS = [{"prompt": f"count {i} from {i % 7}", "completion": " one two three"[: 4 + 5 * (i % 3)]} for i in range(40)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_checkpoint):
    """Three runs: two that differ in the learning rate, and one with other held-out rows."""
    place = tmp_path_factory.mktemp("compared")
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (place / "r.yaml").write_text(
        f"model: {{path: {tiny_checkpoint}}}\n"
        f"data: {{source: {place / 'rows.jsonl'}, eval_fraction: 0.3}}\n"
        "train: {max_steps: 6, per_device_train_batch_size: 4, learning_rate: 1e-3, max_length: 64, logging_steps: 2,\n"
        "  eval_strategy: steps, eval_steps: 3, save_strategy: 'no', seed: 7}\n"
        "eval: {samples: 2, max_new_tokens: 4}\n"
    )
    for name, *overrides in (("one",), ("two", "train.learning_rate=5e-2"), ("other", "data.seed=3")):
        run_recipe(load_recipe(place / "r.yaml", [*overrides, f"train.output_dir={place / name}"]))
    return place


def invoke(*arguments):
    return typer.testing.CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "200"})


def test_rows_add_up_to_the_figures(runs, tiny_checkpoint):
    """Against a loop over single rows, unpadded, with the model as anybody opens it."""
    from transformers import AutoModelForCausalLM

    metrics = json.loads((runs / "one/metrics.json").read_text())
    kept = json.loads((runs / "one/held_out.json").read_text())
    for when in ("before", "after"):
        losses = np.array(kept[when]["parts"]["loss"])
        assert len(losses) == len(kept[when]["rows"]) == metrics[when]["rows"] == 12
        assert losses[:, 1].sum() == metrics[when]["tokens"]
        assert losses.sum(0)[0] / losses.sum(0)[1] == pytest.approx(metrics[when]["loss"], abs=1e-12)
    assert kept["before"]["rows"] == kept["after"]["rows"]

    from anyformer.recipes.held_rows import digest_of
    from anyformer.recipes.prepare import prepare

    prepared = prepare(load_recipe(runs / "one/recipe.yaml"))
    model = AutoModelForCausalLM.from_pretrained(runs / "one").eval()
    by_digest = dict(zip(kept["after"]["rows"], kept["after"]["parts"]["loss"], strict=True))
    for row in prepared.held_out.dataset:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        with torch.no_grad():
            logs = model(ids).logits[0].log_softmax(-1)
        wanted = -sum(logs[at - 1, label].item() for at, label in enumerate(labels.tolist()) if at and label != -100)
        assert by_digest[digest_of(row)] == pytest.approx([wanted, (labels[1:] != -100).sum().item()], abs=1e-4)


def test_paired_difference_is_that_of_a_loop(runs):
    """The percentile bootstrap over rows, written by hand, of the difference of the two losses."""
    found = compare_runs([runs / "one", runs / "two"])
    assert found.recipe == [("train.learning_rate", ("0.001", "0.05"))]
    loss = found.figures[0]
    assert (loss.name, loss.higher_is_better) == ("loss", False)
    cell = loss.cells[1]
    one, two = (json.loads((runs / name / "held_out.json").read_text())["after"] for name in ("one", "two"))
    assert sorted(one["rows"]) == sorted(two["rows"])
    parts = {
        digest: (*first, *dict(zip(two["rows"], two["parts"]["loss"], strict=True))[digest])
        for digest, first in zip(one["rows"], one["parts"]["loss"], strict=True)
    }
    rows = [parts[digest] for digest in sorted(parts)]
    metrics = [json.loads((runs / name / "metrics.json").read_text())["after"]["loss"] for name in ("one", "two")]
    assert cell.difference.value == pytest.approx(metrics[1] - metrics[0], abs=1e-12)
    rng = np.random.default_rng(0)
    drawn = []
    for places in rng.integers(0, len(rows), (2000, len(rows))):
        a, b, c, d = np.array([rows[place] for place in places]).sum(0)
        drawn.append(c / d - a / b)
    assert (cell.difference.low, cell.difference.high) == pytest.approx(np.quantile(drawn, (0.025, 0.975)), abs=1e-9)
    assert cell.difference.low < cell.difference.value < cell.difference.high
    assert cell.before.low < cell.before.value < cell.before.high
    perplexity = found.figures[1].cells[1]
    # Not closer: a quantile between two draws is taken on the line between them, before or after the exponential.
    assert perplexity.after.low == pytest.approx(np.exp(cell.after.low), rel=1e-6)
    assert cell.against == "one" and cell.reason is None


def test_other_rows_are_not_subtracted(runs):
    found = compare_runs([runs / "one", runs / "other", runs / "two"])
    _, other, two = found.figures[0].cells
    assert other.difference is None and other.against is None
    assert "not comparable with one" in other.reason and "held-out row" in other.reason and "data.seed" in other.reason
    assert two.difference is not None and two.against == "one"
    assert other.change is not None  # of its own rows


def test_equal_rows_as_other_tokens_are_not_subtracted(runs, tmp_path):
    shutil.copytree(runs / "two", tmp_path / "two")
    kept = json.loads((tmp_path / "two/held_out.json").read_text())
    kept["after"]["rows"][0] = "0" * 16
    (tmp_path / "two/held_out.json").write_text(json.dumps(kept))
    cell = compare_runs([runs / "one", tmp_path / "two"]).figures[0].cells[1]
    assert cell.difference is None and "11 held-out rows are the same, as tokens, of 12 and 12" in cell.reason


def test_terminal_and_json(runs):
    done = invoke(runs / "one", runs / "two", "--html", runs / "page.html")
    assert done.exit_code == 0, done.output
    for words in ("held-out loss, lower is better", "against one", "train.learning_rate", "0.05", "sample 1", "Page:"):
        assert words in done.output, words
    assert "output_dir" not in done.output
    done = invoke(runs / "one", runs / "two", "--json")
    found = json.loads(done.output)
    assert found["figures"][0]["runs"]["two"]["difference"]["value"] < 0
    assert found["recipe"] == {"train.learning_rate": {"one": "0.001", "two": "0.05"}}
    assert "count" not in done.output.replace('count"', "")


def test_an_unfinished_run_shows_what_it_has(runs, tmp_path):
    shutil.copytree(runs / "two", tmp_path / "cut")
    metrics = json.loads((tmp_path / "cut/metrics.json").read_text())
    kept = {name: metrics[name] for name in ("data_digest", "rows_a_step", "before", "samples_before")}
    (tmp_path / "cut/metrics.json").write_text(json.dumps(kept))
    rows = json.loads((tmp_path / "cut/held_out.json").read_text())
    (tmp_path / "cut/held_out.json").write_text(json.dumps({"before": rows["before"]}))
    (tmp_path / "cut/metrics.csv").write_text("step,loss\n2,3.5\n4,3.25\n6,")
    found = compare_runs([runs / "one", tmp_path / "cut"])
    assert found.remarks == ["cut is unfinished after step 4: what it has so far is shown"]
    assert found.environment == [] and found.recipe == [("train.learning_rate", ("0.001", "0.05"))]
    assert [entry["step"] for entry in found.runs[1].history] == [2, 4]
    cell = found.figures[0].cells[1]
    assert cell.after is None and cell.before.value == metrics["before"]["loss"] and cell.before.low is not None
    assert found.answers[0].after[1] is None and found.answers[0].before[1] is not None
    done = invoke(runs / "one", tmp_path / "cut")
    assert done.exit_code == 0 and "is unfinished" in done.output


def test_a_run_that_diverged_is_shown(runs, tmp_path):
    shutil.copytree(runs / "two", tmp_path / "wild")
    metrics = json.loads((tmp_path / "wild/metrics.json").read_text())
    metrics["history"][0]["loss"], metrics["before"]["loss"] = float("nan"), float("inf")
    (tmp_path / "wild/metrics.json").write_text(json.dumps(metrics))
    found = json.loads(invoke(runs / "one", tmp_path / "wild", "--json").output)
    assert found["history"]["wild"][0]["loss"] is None
    assert found["figures"][0]["runs"]["wild"]["before"]["value"] is None
    assert invoke(runs / "one", tmp_path / "wild", "--html", tmp_path / "page.html").exit_code == 0


def test_a_run_without_rows_has_no_intervals(runs, tmp_path):
    shutil.copytree(runs / "two", tmp_path / "old")
    (tmp_path / "old/held_out.json").unlink()
    found = compare_runs([runs / "one", tmp_path / "old"])
    cell = found.figures[0].cells[1]
    assert cell.after.low is None and cell.difference is None and "old keeps no loss of single rows" in cell.reason
    assert any("keeps no figures of single held-out rows" in remark for remark in found.remarks)


def test_versions_and_machines_that_differ_are_told(runs, tmp_path):
    shutil.copytree(runs / "two", tmp_path / "two")
    metrics = json.loads((tmp_path / "two/metrics.json").read_text())
    metrics["versions"]["torch"], metrics["environment"]["threads"] = "2.6.0", "64"
    (tmp_path / "two/metrics.json").write_text(json.dumps(metrics))
    found = dict(compare_runs([runs / "one", tmp_path / "two"]).environment)
    assert found.keys() == {"versions.torch", "environment.threads"}
    assert found["versions.torch"] == (torch.__version__, "2.6.0")


def test_a_pipeline_stands_for_its_stages(runs, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(runs / name, tmp_path / "line" / name)
    (tmp_path / "line/pipeline.json").write_text(json.dumps({"inputs": {"two": {}, "one": {"two": "x"}}}))
    assert compare_runs([tmp_path / "line"]).names == ["two", "one"]
    both = compare_runs([runs / "one", tmp_path / "line"])
    assert len(set(both.names)) == 3 and both.names[1].endswith("line/two")
    assert both.figures[0].cells[2].against == both.names[0]


def _damage(folder, name, text):
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda one, two: [one], "needs two runs or more"),
        (lambda one, two: [one, two / "../two", two], "is named twice"),
        (lambda one, two: [one, two / "nothing"], "does not exist"),
        (lambda one, two: [one, two / "recipe.yaml"], "is a file"),
        (lambda one, two: [one, two.parent], "no run of `anyformer train`"),
        (lambda one, two: [_damage(two, "metrics.json", "{"), one, two][1:], "is damaged"),
        (lambda one, two: [_damage(two, "metrics.json", "[1]"), one, two][1:], "is damaged"),
        (lambda one, two: [_damage(two, "metrics.json", '{"after": 3}'), one, two][1:], "is damaged"),
        (lambda one, two: [_damage(two, "metrics.json", '{"history": [3]}'), one, two][1:], "is damaged"),
        (lambda one, two: [_damage(two, "metrics.json", '{"samples_after": [3]}'), one, two][1:], "is damaged"),
        (lambda one, two: [_damage(two, "recipe.yaml", "a: [b"), one, two][1:], "cannot be read"),
        (lambda one, two: [_damage(two, "held_out.json", '{"after": {"rows": [1]}}'), one, two][1:], "is damaged"),
        (lambda one, two: [_damage(two, "scores.json", '{"scores": [{"name": "x"}]}'), one, two][1:], "is damaged"),
        (lambda one, two: [one, two, "--html", two], "--html"),
        (lambda one, two: [one, two, "--html", two / "no/page.html"], "cannot be written"),
    ],
)
def test_mistakes_of_runs_end_with_2(runs, tmp_path, make, said):
    for name in ("one", "two"):
        shutil.copytree(runs / name, tmp_path / name)
    done = invoke(*make(tmp_path / "one", tmp_path / "two"))
    assert done.exit_code == 2, done.output
    assert said in done.output and "Traceback" not in done.output


def test_show_prints_what_a_pipe_takes(runs, capsys):
    show_comparison([runs / "one", runs / "two"])
    assert "\x1b[" not in capsys.readouterr().out
