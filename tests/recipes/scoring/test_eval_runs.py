"""`anyformer eval` on a run: held-out rows, what stays in its folder, and what a user can get wrong."""

import json
import math
import shutil

import pytest
import torch
from eval_models import LABELS, MODELS, PAIRS, TEXTS, save, values, write_rows
from huggingface_hub import ModelCard
from labelled import write_recipe
from typer.testing import CliRunner

from anyformer.recipes.comparison.collect import compare_runs
from anyformer.recipes.comparison.figures import Estimate
from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.run import run_recipe
from anyformer.recipes.scoring.kinds import KINDS, Settings, check_names, choose
from anyformer.recipes.scoring.results import as_dict, write
from anyformer.recipes.scoring.rows import Rows
from anyformer.recipes.scoring.run import evaluate, evaluate_tasks
from anyformer.recipes.scoring.score import Score
from anyformer.scripts.cli import app

ROWS = [{"prompt": f"count {i} from {word}", "completion": word} for i in range(8) for word in ("one", "two", "three")]
FAST = ("perplexity", "exact-match")


@pytest.fixture(scope="module")
def run(tiny_checkpoint, tmp_path_factory):
    """A run that held six of 24 rows out, and the file of all rows."""
    folder = tmp_path_factory.mktemp("trained")
    rows = write_rows(folder / "rows.jsonl", ROWS)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""
model: {{path: {tiny_checkpoint}}}
data: {{source: {rows}, eval_fraction: 0.25}}
train: {{output_dir: {folder / "run"}, max_steps: 3, max_length: 64, bf16: false, save_strategy: "no"}}
eval: {{samples: 0, before: false}}
""",
        encoding="utf-8",
    )
    return run_recipe(load_recipe(recipe)), rows


def stored(folder):
    return json.loads((folder / "scores.json").read_text(encoding="utf-8"))


def measured(run, *given):
    return evaluate(str(run), *given, metrics=FAST, settings=Settings(max_new_tokens=4), tell=lambda text: None)


def test_a_run_is_measured_on_what_it_held_out(run):
    folder, _ = run
    found = measured(folder)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert found["data"]["held out"]["rows"] == metrics["after"]["rows"] == 6
    assert found["data"]["held out"]["remarks"] == []
    by_name = {score["name"]: score for score in found["scores"]}
    # The run measured the same labels on the same rows.
    assert by_name["perplexity per token"]["value"] == pytest.approx(metrics["after"]["perplexity"], rel=1e-5)
    assert by_name["perplexity per token"]["details"]["tokens"] == metrics["after"]["tokens"]
    low, high = by_name["perplexity per token"]["low"], by_name["perplexity per token"]["high"]
    assert low < by_name["perplexity per token"]["value"] < high


def test_figures_are_replaced_by_name_and_data_and_others_stay(run, tmp_path):
    folder, rows = run
    measured(folder)
    held_out = stored(folder)["scores"]
    seen = measured(folder, str(rows))
    assert seen["data"][str(rows)]["remarks"] == ["18 of 24 rows are in this run's training data"]
    measured(folder, str(rows))
    whole = stored(folder)
    assert [score for score in whole["scores"] if score["data"] == "held out"] == held_out
    assert len(whole["scores"]) == 4 and len(whole["data"]) == 2
    # Other rows under the same name are told apart.
    original = rows.read_text(encoding="utf-8")
    try:
        write_rows(rows, ROWS[:-1])
        evaluate(str(folder), str(rows), metrics=["exact-match"], tell=lambda text: None)
    finally:
        rows.write_text(original, encoding="utf-8")
    names = [score["data"] for score in stored(folder)["scores"]]
    assert names.count(str(rows)) == 2 and sum(name.startswith(f"{rows} (") for name in names) == 1


def test_two_runs_are_compared_by_the_rows_of_their_scores(run, tmp_path):
    folder, rows = run
    (folder / "scores.json").unlink(missing_ok=True)
    (folder / "scores_rows.json").unlink(missing_ok=True)
    other = shutil.copytree(folder, tmp_path / "other")
    for each in (folder, other):
        measured(each, str(rows))
    lines = {line.name: line for line in compare_runs([folder, other]).scores}
    assert lines.keys() == {"perplexity per token", "exact match"}
    for line in lines.values():
        first, second = line.cells
        assert first.difference is None and second.against == folder.name
        assert second.difference == Estimate(0.0, 0.0, 0.0)
        assert first.estimate.low <= first.estimate.value <= first.estimate.high


def test_tasks_of_a_run_stay_in_its_folder_and_on_its_card(run, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    first = shutil.copytree(run[0], tmp_path / "first")
    for name in ("scores.json", "scores_rows.json"):
        (first / name).unlink(missing_ok=True)
    other = shutil.copytree(first, tmp_path / "second")
    for folder in (first, other):
        evaluate_tasks(str(folder), ["anyformer_passkey"], limit=3)
    (score,) = stored(first)["scores"]
    assert score["data"] == "lm-eval:anyformer_passkey (limit 3)" and score["settings"]["chat"] is False
    text = (first / "README.md").read_text(encoding="utf-8")
    assert f"| {score['data']} | {score['name']} | {score['value']:.4g} |" in text
    (result,) = ModelCard(text).data.eval_results
    assert (result.metric_name, result.metric_value) == (score["name"], score["value"])
    (line,) = compare_runs([first, other]).scores
    assert line.apart is None and line.cells[1].difference.value == 0
    evaluate_tasks(str(other), ["anyformer_passkey"], limit=3, chat=True)
    names = [score["data"] for score in stored(other)["scores"]]
    assert names[0] == score["data"] and names[1].startswith(f"{score['data']} (")


def test_chat_needs_a_template(tmp_path, tiny, run):
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install lm_eval")
    fields, head = MODELS["rope"]
    plain = save(tiny(head=head, vocab_size=512, **fields), tmp_path / "plain")
    with pytest.raises(UserError, match="--chat: the model's tokenizer has no chat template"):
        evaluate_tasks(str(plain), ["anyformer_passkey"], limit=1, chat=True)


def test_a_limit_stands_in_the_name_of_the_data(run):
    folder, rows = run
    (folder / "scores.json").unlink(missing_ok=True)
    for limit in (3, None, 6):  # all six is no limit
        evaluate(str(folder), metrics=["exact-match"], limit=limit, tell=lambda text: None)
    evaluate(str(folder), str(rows), metrics=["exact-match"], limit=5, tell=lambda text: None)
    counts = {score["data"]: score["count"] for score in stored(folder)["scores"]}
    assert counts == {"held out (limit 3)": 3, "held out": 6, f"{rows} (limit 5)": 5}


def test_the_model_card_has_the_figures_once(run):
    folder, _ = run
    before = (folder / "README.md").read_text(encoding="utf-8")
    for _ in range(2):
        measured(folder)
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.count("## Evaluation") == 1 and text.count("| held out | exact match |") == 1
    for heading in ("## Use", "## Reproduce", f"# {folder.name}"):
        assert heading in before and text.count(f"{heading}\n") == 1
    card = ModelCard(text)
    assert card.data.library_name == "transformers"
    results = {(result.dataset_name, result.metric_name): result.metric_value for result in card.data.eval_results}
    assert results == {(score["data"], score["name"]): score["value"] for score in stored(folder)["scores"]}


def test_a_card_that_was_spoilt_is_told_and_left(run):
    folder, _ = run
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8")
    try:
        card.write_text("---\ntags: [unclosed\n---\n# Mine\n", encoding="utf-8")
        with pytest.raises(UserError, match=r"README.md does not take the figures, which are in scores.json"):
            measured(folder)
        assert "# Mine" in card.read_text(encoding="utf-8")
    finally:
        card.write_text(before, encoding="utf-8")


def test_the_command_prints_a_table_or_json(run):
    folder, _ = run
    command = ["eval", str(folder), "--metrics", "exact-match,f1", "--max-new-tokens", "3"]
    table = CliRunner().invoke(app, command)
    assert table.exit_code == 0 and table.stdout.splitlines()[0].split() == [
        "metric",
        "value",
        "95",
        "%",
        "interval",
        "rows",
    ]
    assert "tokens/s" in table.stderr and "answers were cut off" in table.stderr
    as_json = CliRunner().invoke(app, [*command, "--json"])
    assert [score["name"] for score in json.loads(as_json.stdout)["scores"]] == ["exact match", "token F1"]


def test_changed_data_are_noticed(run, tiny_checkpoint):
    folder, rows = run
    original = rows.read_text(encoding="utf-8")
    try:
        write_rows(rows, [{"prompt": "new", "completion": "row"}, *ROWS])
        with pytest.raises(UserError, match="have changed since"):
            measured(folder)
        told = []
        evaluate(str(folder), str(rows), metrics=["exact-match"], limit=2, tell=told.append)
        assert any("not compared with this run's training data" in text for text in told)
    finally:
        rows.write_text(original, encoding="utf-8")


def test_other_models_leave_nothing_but_where_they_are_told_to(tiny_checkpoint, tmp_path):
    on, file = write_rows(tmp_path / "texts.jsonl", TEXTS), tmp_path / "out" / "scores.json"
    evaluate(str(tiny_checkpoint), str(on), tell=lambda text: None)
    assert not (tiny_checkpoint / "scores.json").exists()
    evaluate(str(tiny_checkpoint), str(on), output=file, tell=lambda text: None)
    assert [score["name"] for score in json.loads(file.read_text())["scores"]] == [
        f"perplexity per {unit}" for unit in ("token", "word", "byte")
    ]
    file.write_text('{"something": 1}')
    with pytest.raises(UserError, match="holds no scores"):
        evaluate(str(tiny_checkpoint), str(on), output=file, tell=lambda text: None)
    assert file.read_text() == '{"something": 1}'


def refused(*command):
    done = CliRunner().invoke(app, ["eval", *map(str, command)])
    assert done.exit_code == 2 and "Traceback" not in done.output, done.output
    return done.stderr


def test_mistakes_are_told(tiny_checkpoint, tmp_path):
    texts, pairs = write_rows(tmp_path / "texts.jsonl", TEXTS), write_rows(tmp_path / "pairs.jsonl", PAIRS)
    assert "is no run's folder" in refused(tiny_checkpoint)
    assert "did you mean exact-match?" in refused(tiny_checkpoint, "--on", texts, "--metrics", "exact_match")
    assert "is measured of a classifier, tagger or multi-labeller, and the model is a decoder" in refused(
        tiny_checkpoint, "--on", texts, "--metrics", "accuracy"
    )
    assert "--on: no file matches" in refused(tiny_checkpoint, "--on", tmp_path / "none.jsonl")
    assert "is text, which these metrics cannot use" in refused(tiny_checkpoint, "--on", texts, "--metrics", "f1")
    assert "it must be below the 16 tokens" in refused(tiny_checkpoint, "--on", texts, "--context", 16, "--stride", 16)
    assert "a window holds a token" in refused(tiny_checkpoint, "--on", texts, "--context", 1)
    assert "--on: is empty: give" in refused(tiny_checkpoint, "--on", "")
    assert "--metrics ',' names none" in refused(tiny_checkpoint, "--on", texts, "--metrics", ",")
    assert "--on.splt: unknown key; did you mean 'split'?" in refused(
        tiny_checkpoint, "--on", "{hub: user/name, splt: test}"
    )
    assert "is no YAML" in refused(tiny_checkpoint, "--on", "{path: [}")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "the file is empty" in refused(tiny_checkpoint, "--on", empty)
    assert "text is empty" in refused(tiny_checkpoint, "--on", write_rows(tmp_path / "blank.jsonl", [{"text": " "}]))
    assert "no such folder or file" in refused(tmp_path / "nowhere", "--on", pairs)


def test_models_and_rows_that_do_not_fit_are_told(tiny, tmp_path):
    texts, pairs = write_rows(tmp_path / "texts.jsonl", TEXTS), write_rows(tmp_path / "pairs.jsonl", PAIRS)
    small = save(tiny(vocab_size=101), tmp_path / "small")
    assert "260 tokens but the model's embedding 101 rows" in refused(small, "--on", texts)
    learned = save(tiny(vocab_size=260, position_embedding="learned", max_position_embeddings=8), tmp_path / "learned")
    assert "positions for 8 tokens" in refused(learned, "--on", texts, "--context", 9)
    assert "row 1: the prompt has 8 tokens" in refused(learned, "--on", pairs, "--metrics", "f1")
    broken = tiny(vocab_size=260)
    torch.nn.init.constant_(broken.get_input_embeddings().weight, float("nan"))
    assert "on 5 of 5 rows the model's loss is no number" in refused(save(broken, tmp_path / "nan"), "--on", texts)
    fields, head = MODELS["classifier"]
    classifier = save(tiny(head=head, vocab_size=260, num_key_value_heads=4, **fields), tmp_path / "classifier")
    labels = write_rows(tmp_path / "labels.jsonl", [*LABELS, {"text": "another", "label": 3}])
    assert "row 12: the model has no class '3'; it has LABEL_0, LABEL_1, LABEL_2" in refused(classifier, "--on", labels)


def test_every_kind_of_metrics_is_listed_and_found():
    for name in (name for names in KINDS.values() for name in names):
        check_names([name])
    for head in ("decoder", "encoder-decoder", "masked", "classifier", "tagger"):
        assert choose((), head), head


def test_rows_can_be_named_as_in_a_recipe(tiny_checkpoint, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("question,reply\none,two\nthree,four\n", encoding="utf-8")
    on = f"{{path: {file}, columns: {{prompt: question, completion: reply}}}}"
    found = values(tiny_checkpoint, on, metrics=("perplexity",))
    plain = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "one", "completion": "two"}, {"prompt": "three", "completion": "four"}]
    )
    assert found == values(tiny_checkpoint, plain, metrics=("perplexity",))


@pytest.mark.parametrize(
    "adapter", ["{kind: lora, r: 4, merge: false}", "{kind: prompt-tuning, num_virtual_tokens: 4}"]
)
def test_an_adapter_is_measured_on_its_base(tiny_checkpoint, tmp_path, adapter):
    rows, recipe = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
model: {{path: {tiny_checkpoint}}}
adapter: {adapter}
data: {{source: {rows}, eval_fraction: 0.25}}
train: {{output_dir: {tmp_path / "run"}, max_steps: 2, max_length: 64, bf16: false, save_strategy: "no"}}
eval: {{samples: 0, before: false}}
""",
        encoding="utf-8",
    )
    folder = run_recipe(load_recipe(recipe))
    assert (folder / "adapter_config.json").is_file()
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    found = measured(folder)["scores"][0]
    assert found["value"] == pytest.approx(metrics["after"]["perplexity"], rel=1e-5)


def test_figures_beyond_all_bounds_are_written(tmp_path):
    rows = Rows("some", "text", [{"text": "x"}])
    score = Score("perplexity per word", 1e300, 1e200, float("inf"), 1, "lower")
    write(tmp_path / "scores.json", as_dict("model", rows, [score], {}))
    (entry,) = stored(tmp_path)["scores"]
    assert (entry["low"], entry["high"]) == (1e200, None)


OBJECTIVES = {
    "classify": ([{"text": row["completion"], "label": row["prompt"][6]} for row in ROWS], "encoder"),
    "token-classify": ([{"tokens": [row["completion"], "x"], "tags": ["B-A", "O"]} for row in ROWS], "encoder"),
    "seq2seq": ([{"source": row["prompt"], "target": row["completion"]} for row in ROWS], "encoder-decoder"),
    "mlm": ([{"text": row["prompt"]} for row in ROWS], "encoder"),
    "pretrain": ([{"text": row["prompt"]} for row in ROWS], "decoder"),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_runs_of_other_objectives_are_measured_as_they_measured_themselves(tmp_path, objective):
    rows, shape = OBJECTIVES[objective]
    folder = run_recipe(write_recipe(tmp_path, objective, rows, shape=shape)("train.max_steps=2", "eval.before=false"))
    after = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["after"]
    found = {score["name"]: score["value"] for score in evaluate(str(folder), tell=lambda text: None)["scores"]}
    if objective == "classify":
        assert found == pytest.approx({"accuracy": after["accuracy"], "macro F1": after["macro_f1"]})
    elif objective == "token-classify":
        assert found["token accuracy"] == pytest.approx(after["token_accuracy"])
    elif objective == "seq2seq":
        assert found["perplexity per token"] == pytest.approx(math.exp(after["loss"]), rel=1e-5)
        assert found.keys() == {"perplexity per token", "exact match", "token F1"}
    else:
        name = "pseudo-perplexity" if objective == "mlm" else "perplexity"
        assert found.keys() == {f"{name} per {unit}" for unit in ("token", "word", "byte")}


def test_windows_are_for_decoders(tiny, tmp_path):
    fields, head = MODELS["encoder-decoder"]
    model = save(tiny(head=head, vocab_size=260, num_key_value_heads=4, **fields), tmp_path / "model")
    pairs = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    for option in (("--context", 8), ("--stride", 8), ("--rows", "packed")):
        assert "are for decoders" in refused(model, "--on", pairs, "--metrics", "perplexity", *option)


def test_rows_without_a_token_to_predict_are_left_out_and_counted(tiny_checkpoint, tmp_path):
    # The middle row's answer is not to be learned, and so not measured.
    rows = [{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": text}]} for text in "ab"]
    rows.insert(1, {"messages": [rows[0]["messages"][0], rows[0]["messages"][1] | {"train": False}]})
    on, told = write_rows(tmp_path / "rows.jsonl", rows), []
    found = evaluate(str(tiny_checkpoint), str(on), metrics=["perplexity"], tell=told.append)
    assert found["scores"][0]["count"] == 2
    assert "perplexity: 1 row left out: nothing supervised" in told
