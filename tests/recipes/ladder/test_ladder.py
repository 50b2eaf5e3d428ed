"""`anyformer ladder`: rungs that differ in one part, trained alike, measured on the same rows."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest

from anyformer import AnyformerConfig
from anyformer.modeling.cache_sizes import predicted_size
from anyformer.modeling.counting import count
from anyformer.recipes.errors import UserError
from anyformer.recipes.ladder.measure import PROMPT, WRITTEN, Estimate, Figures, Speed
from anyformer.recipes.ladder.run import run_ladder
from anyformer.recipes.ladder.rungs import rungs_of
from anyformer.recipes.ladder.table import draw, markdown, rows_of
from anyformer.recipes.stages import load_pipeline
from anyformer.scripts.cli import main

COMMON = """
model:
  preset: mini-gpt
  tokenizer: builtin:bytes
  config: {{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64,
            max_position_embeddings: 160, norm_position: post}}
data: {{source: {data}, eval_fraction: 0.3, seed: 1}}
objective: {{kind: pretrain, packing: blocks, max_length: 144}}
train: {{max_steps: 2, per_device_train_batch_size: 2, learning_rate: 1e-3, save_steps: 1, use_cpu: true, bf16: false,
         logging_steps: 1}}
eval: {{samples: 0, before: false}}
logging: {{plot: false}}
"""
RUNGS = {
    "1-first.yaml": "# The first.\nextends: common.yaml\n",
    "2-pre.yaml": "# Norms before.\nextends: 1-first.yaml\nmodel: {config: {norm_position: pre}}\n",
    "3-alibi.yaml": "# Distances.\nextends: 1-first.yaml\nmodel: {config: {position_embedding: alibi}}\n",
    "4-mqa.yaml": "# One head.\nextends: 2-pre.yaml\nmodel: {config: {num_key_value_heads: 1}}\n",
}


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder") / "small"
    return write(folder)


def write(folder, **changed):
    folder.mkdir()
    rng, data = random.Random(0), folder / "texts.jsonl"
    lines = (json.dumps({"text": " ".join(rng.choices(["one", "two", "three", "cat"], k=60))}) for _ in range(30))
    data.write_text("\n".join(lines), encoding="utf-8")
    (folder / "common.yaml").write_text(COMMON.format(data=data), encoding="utf-8")
    for name, text in (RUNGS | changed).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(ladder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    run_ladder(str(ladder), [f"train.output_dir={folder}"])
    return folder


def figures(folder):
    return json.loads((folder / "ladder.json").read_text(encoding="utf-8"))


def test_figures_are_those_of_the_runs(run):
    found = figures(run)
    metrics = json.loads((run / "first" / "metrics.json").read_text(encoding="utf-8"))
    assert found["shared"] == {"tokens": metrics["training"]["tokens"], "seed": 42, "steps": 2}
    assert 288 < found["shared"]["tokens"] <= 2 * 288
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    assert list(rungs) == ["first", "pre", "alibi", "mqa"]
    for name, rung in rungs.items():
        metrics = json.loads((run / name / "metrics.json").read_text(encoding="utf-8"))
        config = AnyformerConfig.from_pretrained(run / name)
        assert rung["loss"]["value"] == pytest.approx(metrics["after"]["loss"], abs=1e-5)
        assert rung["perplexity"] == pytest.approx(math.exp(metrics["after"]["loss"]), rel=1e-5)
        assert rung["loss"]["low"] <= rung["loss"]["value"] <= rung["loss"]["high"]
        assert rung["rows"] == metrics["after"]["rows"] > 1
        assert rung["cache"] == predicted_size(config, PROMPT + WRITTEN - 1)
        assert rung["cache_token"] == predicted_size(config, 1)
        assert rung["parameters"] == count(config).total_parameters
        assert rung["train"]["tokens"] > 0 and rung["decode"]["tokens"] > 0
    for name, parent in (("pre", "first"), ("alibi", "first"), ("mqa", "pre")):
        gain = rungs[name]["gain"]
        assert rungs[name]["parent"] == parent
        assert gain["value"] == pytest.approx(rungs[parent]["loss"]["value"] - rungs[name]["loss"]["value"], abs=1e-9)
        assert gain["low"] <= gain["value"] <= gain["high"]
    assert rungs["first"]["gain"] is None and rungs["first"]["train"]["ratio"] == 1.0
    assert rungs["mqa"]["cache_token"] * 4 == rungs["pre"]["cache_token"]
    assert rungs["mqa"]["changes"] == {"num_key_value_heads": [4, 1]}


def test_the_document_and_the_picture(run):
    text = (run / "ladder.md").read_text(encoding="utf-8")
    assert "4 rungs" in text and "2 steps, " in text and "**alibi**: Distances." in text
    assert "first: position&#95;embedding learned → alibi" in text
    assert "<svg" in (run / "ladder.svg").read_text(encoding="utf-8")


def test_a_finished_ladder_is_measured_again_and_not_trained_again(ladder, run):
    before = {file: file.stat().st_mtime_ns for file in run.glob("*/model.safetensors")}
    losses = [rung["loss"] for rung in figures(run)["rungs"]]
    (run / "ladder.json").unlink()
    run_ladder(str(ladder), [f"train.output_dir={run}"], resume=True)
    assert [rung["loss"] for rung in figures(run)["rungs"]] == losses
    assert {file: file.stat().st_mtime_ns for file in run.glob("*/model.safetensors")} == before and len(before) == 4
    with pytest.raises(UserError, match=r"holds a pipeline .*--overwrite"):
        run_ladder(str(ladder), [f"train.output_dir={run}"])
    with pytest.raises(UserError, match=r"train\.max_steps"):
        run_ladder(str(ladder), [f"train.output_dir={run}"], budget="10k", resume=True)


def test_a_budget_is_tokens_of_each_rung(ladder, capsys):
    run_ladder(str(ladder), [], budget="3k", dry_run=True)
    assert capsys.readouterr().out.count(" 10 steps over ") == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "100"], "a step has 288 tokens: give at least that"),
        (["--budget", "lots"], "--budget: 'lots' is no number"),
        (["pre.train.seed=3"], "stage pre (2-pre.yaml): train.seed differs from stage first"),
        (["mqa.data.max_rows=4"], "data.max_rows differs"),
        (["mqa.model.config.num_key_value_heads=null"], "stage mqa (4-mqa.yaml): changes nothing of pre"),
        (["adapter={kind: lora, r: 2}"], "adapter.kind: a rung of a ladder trains all weights"),
        (["data.eval_fraction=0"], "no row is held out"),
        (["objective.packing=none"], "objective.packing: none: rows of all lengths"),
        (["model.config.max_position_embeddings=100"], "max_position_embeddings is 100: speeds are measured on"),
    ],
)
def test_mistakes_are_told_in_one_message(ladder, words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["anyformer", "ladder", str(ladder), *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and said in told and "Traceback" not in told
    assert not list(tmp_path.iterdir())


def test_other_pipelines_are_no_ladders(tmp_path):
    with pytest.raises(UserError, match=r"stage sft \(1-sft.yaml\): a rung of a ladder pretrains a new model"):
        run_ladder("rlhf", dry_run=True)
    with pytest.raises(UserError, match="no such pipeline"):
        run_ladder(str(tmp_path), dry_run=True)


def test_the_shipped_ladder_changes_one_part_at_a_time():
    rungs = {rung.name: rung for rung in rungs_of(load_pipeline("ladder"))}
    parts = {
        "pre-norm": {"norm_position"},
        "rmsnorm": {"norm"},
        "learned": {"position_embedding"},
        "alibi": {"position_embedding"},
        "rope": {"position_embedding"},
        "gelu": {"hidden_act"},
        "swiglu": {"mlp", "hidden_act", "intermediate_size"},
        "gqa": {"num_key_value_heads"},
        "mqa": {"num_key_value_heads"},
        "mla": {"attention", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"},
        "moe": {"num_experts", "moe_intermediate_size"},
    }
    assert {name: set(rung.changes) for name, rung in rungs.items() if rung.parent} == parts
    assert [rungs[name].parent for name in ("alibi", "rope", "mqa", "mla", "moe")] == [
        "rmsnorm",
        "rmsnorm",
        "swiglu",
        "swiglu",
        "gqa",
    ]

    def counts(name):
        from anyformer.recipes.loading import load_preset

        section = rungs[name].stage.recipe.model
        return count(AnyformerConfig(**(load_preset(section.preset) | section.config)))

    assert counts("swiglu").total_parameters == pytest.approx(counts("gelu").total_parameters, rel=2e-3)
    assert counts("moe").active_parameters == pytest.approx(counts("gqa").total_parameters, rel=1e-2)
    assert counts("moe").total_parameters > 2 * counts("gqa").total_parameters


def test_what_one_row_cannot_say_is_said_and_drawn(tmp_path):
    nan = float("nan")
    speed = Speed(10.0, 1.0)
    one = Figures("a|b", None, {}, "x", 9, 5, 1, Estimate(1.0, nan, nan), None, speed, speed, 4, 4)
    assert rows_of([one])[0][2:4] == ("9, 5 active", "1.0000 (unknown)")
    gained = dataclasses.replace(one, gain=Estimate(0.5, nan, nan), parent="z").as_dict()
    assert gained["gain"] == {"value": 0.5, "low": None, "high": None} and gained["loss"]["low"] is None
    assert "a&#124;b" in markdown("n", [one], 1, "about", "p.svg")
    draw([one], tmp_path / "p.svg")
    assert np.char.count((tmp_path / "p.svg").read_text(encoding="utf-8"), "<svg") == 1
