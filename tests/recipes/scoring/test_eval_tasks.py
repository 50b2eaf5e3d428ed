"""`anyformer eval --tasks`: lm-evaluation-harness by the command line."""

import json

import pytest
from eval_models import MODELS, PAIRS, save, write_rows
from typer.testing import CliRunner

from anyformer.recipes.scoring import harness, run
from anyformer.scripts.cli import app


def command(*given):
    return CliRunner().invoke(app, ["eval", *map(str, given)])


def refused(*given):
    result = command(*given)
    assert result.exit_code == 2, result.output
    return result.output


@pytest.fixture
def own_task(tmp_path):
    """A task that a model answers by the likelier of two choices."""
    rows = [{"question": row["prompt"], "choices": [row["completion"], "no"], "label": 0} for row in PAIRS]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    file = tmp_path / "own.yaml"
    file.write_text(
        f"""
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""",
        encoding="utf-8",
    )
    return file


def test_tasks_are_measured_and_kept_each_as_data_of_its_own(tiny_checkpoint, own_task, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "scores.json"
    given = (tiny_checkpoint, "--tasks", f"{own_task},anyformer_passkey", "--output", file)
    result = command(*given, "--limit", 3, "--fewshot", 0)
    assert result.exit_code == 0, result.output
    stored = json.loads(file.read_text(encoding="utf-8"))
    by_data = {score["data"]: score for score in stored["scores"]}
    assert by_data.keys() == stored["data"].keys() == {"lm-eval:own (limit 3)", "lm-eval:anyformer_passkey (limit 3)"}
    own = by_data["lm-eval:own (limit 3)"]
    assert own["count"] == stored["data"]["lm-eval:own (limit 3)"]["rows"] == 3
    assert own["value"] in (0, 1 / 3, 2 / 3, 1)
    assert own["settings"]["tasks"] == [str(own_task), "anyformer_passkey"]
    assert "own acc" in result.output
    # Of more documents it is another figure; of as many it gives way.
    for limit in (3, 2):
        assert command(*given, "--limit", limit).exit_code == 0
    names = [score["data"] for score in json.loads(file.read_text(encoding="utf-8"))["scores"]]
    assert len(names) == 4 and sum(name.startswith("lm-eval:own") for name in names) == 2


def test_mistakes_with_tasks_are_told(tiny, tiny_checkpoint, tmp_path, monkeypatch):
    assert "leave --on and --metrics out" in refused(tiny_checkpoint, "--tasks", "anyformer_text", "--on", "x")
    assert "leave --on and --metrics out" in refused(tiny_checkpoint, "--tasks", "anyformer_text", "--metrics", "f1")
    assert "--fewshot is for tasks" in refused(tiny_checkpoint, "--fewshot", 2)
    assert "--chat is for tasks" in refused(tiny_checkpoint, "--chat")
    assert "no task is named; shipped: anyformer_docstrings" in refused(tiny_checkpoint, "--tasks", ",")
    fields, head = MODELS["classifier"]
    classifier = save(tiny(head=head, vocab_size=260, num_key_value_heads=4, **fields), tmp_path / "classifier")
    assert "is a classifier: measure it on rows" in refused(classifier, "--tasks", "anyformer_text")
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(run, "open_subject", lambda *given, **options: pytest.fail("a model was opened"))
    assert "pip install 'anyformer[harness]'" in refused(tiny_checkpoint, "--tasks", "anyformer_text")
