"""Pipelines from first stage to report: two of supervised tuning and one of a policy, on a tiny model."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from anyformer.recipes.errors import UserError
from anyformer.recipes.pipeline import run_pipeline
from anyformer.recipes.progress import TrainingProgress
from anyformer.recipes.run_folder import RunFolder
from anyformer.recipes.stages import load_pipeline

REWARD = """
def vowels(prompts, completions, **columns):
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]
"""
COMMON = """\
data: {{source: {rows}, eval_fraction: 0.2, seed: 3}}
adapter: {{kind: lora, r: 4, lora_dropout: 0.1, target_modules: all-linear}}
train:
  max_steps: 4
  save_steps: 2
  per_device_train_batch_size: 8
  learning_rate: 1e-2
  logging_steps: 1
  seed: 7
eval: {{samples: 1}}
"""


@pytest.fixture
def pipeline(tmp_path, tiny_checkpoint, rows, monkeypatch):
    """A function: the pipeline with overrides, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "toy"
    folder.mkdir()
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "common.yaml").write_text(COMMON.format(rows=rows), encoding="utf-8")
    extends = "extends: common.yaml\n"
    objective = "objective: {kind: grpo, reward: 'reward.py:vowels'}\n"
    train = "train: {num_generations: 4, max_completion_length: 6, beta: 0.1}\n"
    texts = {
        "1-sft": f"{extends}model: {{path: {tiny_checkpoint}}}\n"
        "train: {max_length: 64}\neval: {max_new_tokens: 6}\n",
        "2-more": f"{extends}model: {{path: stage:sft}}\nadapter: {{kind: none}}\n"
        "train: {max_length: 64, learning_rate: 1e-3}\neval: {max_new_tokens: 6}\n",
        "3-policy": f"{extends}model: {{path: stage:more}}\n{objective}{train}",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return lambda *overrides: load_pipeline(folder, overrides)


def metrics_of(folder: Path):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def times(folder: Path):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def equal(one: Path, other: Path) -> bool:
    expected, got = (load_file(folder / "model.safetensors") for folder in (one, other))
    return expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)


def by_hand(folder: Path, prompt: str, count: int) -> list[int]:
    """The greedy answer to one prompt, a token at a time, up to and including the stop token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt)["input_ids"]
    answer: list[int] = []
    while len(answer) < count and 2 not in answer:
        answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return answer


# From first to last


def test_each_stage_starts_from_the_last_and_the_report_compares_them(pipeline, capsys):
    folder = run_pipeline(pipeline())
    assert folder == Path("runs/toy")
    output = capsys.readouterr().out
    metrics = {name: metrics_of(folder / name) for name in ("sft", "more", "policy")}
    assert all(values["finished"] for values in metrics.values())
    # What one stage measures before is what the one that it starts from measured after.
    assert metrics["more"]["before"] == pytest.approx(metrics["sft"]["after"], abs=1e-4)
    assert metrics["sft"]["after"]["loss"] < metrics["sft"]["before"]["loss"] - 0.2
    figures = json.loads((folder / "pipeline.json").read_text(encoding="utf-8"))["report"]
    models = {model["name"]: model for model in figures["comparison"]["models"]}
    assert list(models) == ["base", "sft", "more", "policy"]
    for when, name in (("before", "more"), ("after", "policy")):
        for figure in ("reward", "length", "stopped"):
            assert models[name][figure] == pytest.approx(metrics["policy"][when][figure], abs=1e-6)
    history = [entry["kl"] for entry in metrics["policy"]["history"] if "kl" in entry]
    assert [value for _, value in figures["stages"][2]["kl"]] == history and len(history) == 4
    text = (folder / "report.md").read_text(encoding="utf-8")
    for shown in (f"{models['policy']['reward']:.4f}", f"{history[-1]:.4f}", "| prompt | in the data | base | sft |"):
        assert shown in text
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "stage 2 of 3: more" in output and "anyformer chat runs/toy/policy" in output
    assert output.count("Next:") == 1
    # A stage's stored recipe runs by itself.
    assert "path: runs/toy/more" in (folder / "policy" / "recipe.yaml").read_text(encoding="utf-8")


def test_the_reports_divergence_is_that_of_a_computation_by_hand(pipeline):
    folder = run_pipeline(pipeline("policy.train.learning_rate=5e-2", "policy.train.beta=0.0"))
    comparison = json.loads((folder / "pipeline.json").read_text(encoding="utf-8"))["report"]["comparison"]
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text(encoding="utf-8").splitlines()]
    pipe = pipeline()
    from anyformer.recipes.data import load_splits

    held = [row["prompt"] for row in load_splits(pipe["sft"].recipe.data).eval]
    assert comparison["rows"] == len(held) > 3 and {row["prompt"] for row in rows} > set(held)
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("policy", "more"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    total, tokens = 0.0, 0
    for prompt in held:
        answer = by_hand(folder / "policy", prompt, 6)
        ids = tokenizer(prompt)["input_ids"]
        for at in range(len(answer)):
            context = torch.tensor([ids + answer[:at]])
            one, other = (model(context).logits[0, -1].log_softmax(-1)[answer[at]] for model in (policy, reference))
            total += (one - other).item()
        tokens += len(answer)
    kl = comparison["kl"]
    assert (kl["of"], kl["from"]) == ("policy", "more")
    # A sum over some sixty tokens in fp32, batched and cached differently.
    assert kl["answer"] == pytest.approx(total / len(held), abs=1e-4) and abs(kl["answer"]) > 0.01
    assert kl["token"] == pytest.approx(total / tokens, abs=1e-4)
    sample = comparison["samples"][0]
    assert sample["prompt"] == held[0] and sample["reference"]
    expected = tokenizer.decode(by_hand(folder / "policy", held[0], 6), skip_special_tokens=True).strip()
    assert sample["answers"]["policy"]["text"] == expected


@pytest.fixture
def judged(tmp_path, tiny_checkpoint, monkeypatch):
    """The three stages of RLHF on pairs that a letter tells apart."""
    monkeypatch.chdir(tmp_path)
    pairs = [{"prompt": f"count {i}", "chosen": f"a{i % 3} aa", "rejected": f"z{i % 3} zz"} for i in range(40)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    Path("rl").mkdir()
    Path("rl/common.yaml").write_text(COMMON.format(rows="pairs.jsonl"), encoding="utf-8")
    full = "adapter: {kind: none}\n"
    texts = {
        "1-sft": f"model: {{path: {tiny_checkpoint}}}\ndata: {{format: prompt-completion}}\n"
        "train: {max_length: 64}\n",
        "2-reward": f"model: {{path: stage:sft}}\n{full}objective: {{kind: reward}}\n"
        "train: {max_length: 64, max_steps: 12, learning_rate: 3e-3}\n",
        "3-policy": "model: {path: stage:sft}\nobjective: {kind: ppo, reward: stage:reward}\n"
        "train: {max_completion_length: 6, beta: 0.05}\n",
    }
    for name, text in texts.items():
        Path(f"rl/{name}.yaml").write_text(f"extends: common.yaml\n{text}", encoding="utf-8")
    return lambda *overrides: load_pipeline("rl", overrides)


def test_the_trained_reward_model_judges_all_models(judged):
    from transformers import AutoModelForSequenceClassification

    folder = run_pipeline(judged())
    metrics = {name: metrics_of(folder / name) for name in ("sft", "reward", "policy")}
    assert metrics["reward"]["after"]["accuracy"] == 1.0
    figures = json.loads((folder / "pipeline.json").read_text(encoding="utf-8"))["report"]
    comparison, stages = figures["comparison"], figures["stages"]
    assert comparison["reward"] == "stage:reward" and comparison["kl"]["from"] == "sft"
    assert [model["name"] for model in comparison["models"]] == ["base", "sft", "policy"]
    rewards = {model["name"]: model["reward"] for model in comparison["models"]}
    assert rewards["sft"] == pytest.approx(metrics["policy"]["before"]["reward"], abs=1e-6)
    assert rewards["policy"] == pytest.approx(metrics["policy"]["after"]["reward"], abs=1e-6)
    # PPO logs the divergence of a completion and of a token; the report has that of a token, as of the other trainers.
    assert [value for _, value in stages[2]["kl"]] == [
        entry["kl_per_token"] for entry in metrics["policy"]["history"] if "kl_per_token" in entry
    ]
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "reward")
    for sample in comparison["samples"]:
        for name in ("base", "sft", "policy"):
            shown = sample["answers"][name]
            model = folder / name if name != "base" else judged()["sft"].recipe.model.path
            answer = tokenizer.decode(by_hand(model, sample["prompt"], 6), skip_special_tokens=True)
            assert shown["text"] == answer.strip()
            ids = tokenizer(sample["prompt"] + answer)["input_ids"] + [2]  # a whole answer ends with the stop token
            assert shown["reward"] == pytest.approx(judge(torch.tensor([ids])).logits.item(), abs=1e-5)


def test_a_pipeline_without_a_policy_compares_its_models_too(pipeline, tmp_path):
    (tmp_path / "toy" / "3-policy.yaml").unlink()
    folder = run_pipeline(pipeline("train.max_steps=1", "logging.plot=false"))
    comparison = json.loads((folder / "pipeline.json").read_text(encoding="utf-8"))["report"]["comparison"]
    assert [model["name"] for model in comparison["models"]] == ["base", "sft", "more"]
    assert comparison["models"][0]["reward"] is None and comparison["kl"]["from"] == "sft"
    assert not (folder / "curves.png").exists()


def test_a_stage_goes_on_from_the_adapter_of_another(pipeline, tmp_path, tiny_checkpoint, capsys):
    (tmp_path / "toy" / "3-policy.yaml").unlink()
    base = f"more.model.path={tiny_checkpoint}"
    adapter = "more.adapter={path: 'stage:sft', merge: false}"
    run_pipeline(pipeline(base, adapter), dry_run=True)
    assert "more can be planned once sft exists" in capsys.readouterr().out
    folder = run_pipeline(pipeline("train.max_steps=2", "train.learning_rate=1e-2", base, adapter))
    held = [load_file(path / "adapter_model.safetensors") for path in (folder / "sft" / "adapter", folder / "more")]
    assert held[0].keys() == held[1].keys()
    metrics = [metrics_of(folder / name) for name in ("sft", "more")]
    assert metrics[1]["before"]["loss"] == pytest.approx(metrics[0]["after"]["loss"], abs=1e-5)


# Resuming

KILL = """
import os, signal, sys
from anyformer.recipes.progress import TrainingProgress

stage = sys.argv.pop(1)

def kill(self, args, state, control, **kwargs):
    if args.output_dir.endswith(stage):
        os.kill(os.getpid(), signal.SIGKILL)

TrainingProgress.on_save = kill
from anyformer.scripts.cli import main
main()
"""


def test_killed_in_the_second_stage_it_resumes_bit_for_bit(pipeline, capsys):
    whole = run_pipeline(pipeline("train.output_dir=whole"))
    command = [sys.executable, "-c", KILL, "more", "train", "toy", "train.output_dir=killed"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    killed = Path("killed")
    assert (killed / "more" / "checkpoint-2").is_dir() and not (killed / "policy").exists()
    first = times(killed / "sft")
    with pytest.raises(
        UserError, match=r"killed holds a pipeline \(finished: sft\): give --resume to go on, --overwrite"
    ):
        run_pipeline(pipeline("train.output_dir=killed"))
    capsys.readouterr()
    run_pipeline(pipeline("train.output_dir=killed"), resume=True)
    output = capsys.readouterr().out
    assert "Finished already: killed/sft" in output and "goes on from checkpoint-2" in output
    assert times(killed / "sft") == first
    for name in ("sft", "more", "policy"):
        assert equal(whole / name, killed / name)
    reports = [json.loads((folder / "pipeline.json").read_text())["report"]["comparison"] for folder in (whole, killed)]
    assert reports[0] == reports[1]
    with pytest.raises(UserError, match="killed holds a finished pipeline: there is nothing to resume"):
        run_pipeline(pipeline("train.output_dir=killed"), resume=True)


@pytest.fixture
def halted(pipeline, monkeypatch):
    """A function: run the pipeline until a stage saves its first checkpoint, or, without `saved`, begins to train."""

    def halt(name: str, *overrides: str, saved: bool = True, **options: bool) -> Path:
        def stop(self, args, *rest, **more):
            if args.output_dir.endswith(name):
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(TrainingProgress, "on_save" if saved else "on_step_end", stop)
            with pytest.raises(KeyboardInterrupt):
                run_pipeline(pipeline(*overrides), **options)
        return pipeline(*overrides).folder

    return halt


def test_a_stage_without_a_checkpoint_starts_anew(pipeline, halted, capsys):
    folder = halted("policy", saved=False)
    assert not list((folder / "policy").glob("checkpoint-*"))
    kept = times(folder / "more")
    run_pipeline(pipeline(), resume=True)
    assert metrics_of(folder / "policy")["finished"] and times(folder / "more") == kept


def test_a_kill_before_the_report_leaves_the_report_to_do(pipeline, monkeypatch):
    import anyformer.recipes.pipeline_report as module

    def stop(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "figures_of", stop)
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(pipeline("train.max_steps=1"))
    kept = times(Path("runs/toy/policy"))
    run_pipeline(pipeline("train.max_steps=1"), resume=True)
    assert times(Path("runs/toy/policy")) == kept and Path("runs/toy/report.md").is_file()


def test_a_stage_is_gone_on_with_only_as_it_was_started(pipeline, halted):
    folder = halted("more")
    with pytest.raises(UserError, match=r"stage sft: its recipe differs .* in train.learning_rate.*--overwrite"):
        run_pipeline(pipeline("sft.train.learning_rate=1e-4"), resume=True)
    with pytest.raises(UserError, match=r"stage more: its recipe differs .* in data"):
        run_pipeline(pipeline("more.data.seed=9"), resume=True)
    # Another output of the first stage, as if somebody had trained it again.
    values = metrics_of(folder / "sft")
    (folder / "sft" / "metrics.json").write_text(json.dumps(values | {"training": {"seconds": 0.0}}))
    with pytest.raises(UserError, match=r"stage more: .* was trained on another output of stage sft"):
        run_pipeline(pipeline(), resume=True)
    # Once it is gone too, nothing contradicts the new first stage.
    shutil.rmtree(folder / "more")
    run_pipeline(pipeline(), resume=True)
    assert metrics_of(folder / "policy")["finished"]


def test_a_finished_stage_is_not_passed_over_when_its_rows_have_changed(pipeline, halted, rows):
    halted("more")
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "count on from one", "completion": "two three"}) + "\n")
    with pytest.raises(UserError, match=r"stage sft: its rows differ .*data\.source .*Restore the files\."):
        run_pipeline(pipeline(), resume=True)


def test_resume_begins_where_there_is_nothing_yet(pipeline, capsys):
    """One command begins a pipeline and goes on with it."""
    run_pipeline(pipeline("train.max_steps=1"), resume=True)
    assert "to train" in capsys.readouterr().out
    assert all(metrics_of(Path("runs/toy") / name)["finished"] for name in ("sft", "more", "policy"))


# Replacing


def test_overwrite_replaces_all_stages_at_once(pipeline, halted):
    fast = ("train.max_steps=2",)
    folder = run_pipeline(pipeline(*fast))
    before = times(folder)
    with pytest.raises(UserError, match=r"holds a pipeline \(finished: sft, more, policy\): give --overwrite"):
        run_pipeline(pipeline(*fast))
    # All that can be refused is refused while the earlier pipeline still stands.
    for wrong in ("policy.data.source=/nowhere.jsonl", "sft.model.path=/nowhere", "more.train.max_length=9999"):
        with pytest.raises(UserError, match=r"stage (sft|more|policy) \(\d-\w+.yaml\): "):
            run_pipeline(pipeline(*fast, wrong), overwrite=True)
    assert times(folder) == before
    halted("sft", *fast, overwrite=True)
    assert not (folder / "more").exists() and not (folder / "policy").exists() and not (folder / "report.md").exists()
    run_pipeline(pipeline(*fast), resume=True)
    assert (folder / "report.md").is_file()


@pytest.mark.parametrize("held", ["", "more"])
def test_what_another_run_writes_is_left_alone(pipeline, monkeypatch, held):
    folder = run_pipeline(pipeline("train.max_steps=1"))
    monkeypatch.setattr("anyformer.recipes.run_folder._PATIENCE", 0.1)
    with RunFolder(folder / held).held(), pytest.raises(UserError, match="is being written by another run"):
        run_pipeline(pipeline("train.max_steps=1"), overwrite=True)
    assert all((folder / stage / "model.safetensors").is_file() for stage in ("sft", "more"))


def test_what_belongs_to_others_is_not_touched(pipeline, rows):
    thesis = Path("runs/toy/more/thesis.txt")
    thesis.parent.mkdir(parents=True)
    thesis.write_text("precious")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UserError, match=r"stage more .*not empty and holds no run"):
            run_pipeline(pipeline(), **options)
    Path("theirs").mkdir()
    Path("theirs/report.md").write_text("mine")
    with pytest.raises(UserError, match=r"theirs/report.md is not of a pipeline"):
        run_pipeline(pipeline("train.output_dir=theirs"), overwrite=True)
    Path("file").write_text("mine")
    with pytest.raises(UserError, match="file is a file"):
        run_pipeline(pipeline("train.output_dir=file"))
    assert thesis.read_text() == "precious" and not Path("runs/toy/sft").exists()
    Path("data").mkdir()
    shutil.copy(rows, "data/rows.jsonl")
    with pytest.raises(
        UserError, match=r"stage policy .*train.output_dir data holds data/rows.jsonl, which the run reads"
    ):
        run_pipeline(pipeline("policy.data.source=data/rows.jsonl", "sft.train.output_dir=data"), overwrite=True)


# Before it runs


def test_a_dry_run_plans_every_stage_and_writes_nothing(pipeline, capsys):
    run_pipeline(pipeline(), dry_run=True)
    output = capsys.readouterr().out
    assert output.count("Planned as if") == 2 and "Planned as if more had run" in output
    assert output.count("4 steps over") == 3 and not Path("runs").exists()


def test_a_fault_in_the_last_stage_is_found_before_the_first_trains(pipeline):
    with pytest.raises(UserError, match=r"stage policy \(3-policy.yaml\): train.max_completion_length is 400"):
        run_pipeline(pipeline("policy.train.max_completion_length=400"))
    assert not Path("runs").exists()


def test_held_out_rows_must_not_have_been_trained_on(pipeline, rows, capsys):
    with pytest.raises(
        UserError, match=r"\d+ of the \d+ prompts that stage policy holds out are trained on in stage sft "
    ):
        run_pipeline(pipeline("policy.data.seed=4"))
    with pytest.raises(UserError, match=r"rows already seen.* they differ in data.eval_fraction"):
        run_pipeline(pipeline("more.data.eval_fraction=0.5"))
    # A smaller part of what the earlier stages hold out is fine.
    run_pipeline(pipeline("policy.data.eval_fraction=0.1", "policy.data.max_eval_rows=3"), dry_run=True)
    other = Path("other.jsonl")
    other.write_text(rows.read_text(encoding="utf-8"), encoding="utf-8")
    run_pipeline(pipeline("policy.data={source: other.jsonl, seed: 4}"), dry_run=True)
    assert "Warning: " in (output := capsys.readouterr().out) and "say little about new prompts" in output


def test_one_process_only(pipeline, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="a pipeline runs in one process"):
        run_pipeline(pipeline())


# The command line


def test_the_command_line(pipeline, capsys):
    from typer.testing import CliRunner

    from anyformer.recipes.yaml_tree import read_yaml
    from anyformer.scripts.cli import app

    def run(*words: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["train", "toy", *words])
        assert result.exit_code == status, result.output
        return result.output

    printed = run("--print-config", "policy.train.seed=9")
    documents = printed.split("--- # ")[1:]
    assert [text.partition("\n")[0] for text in documents] == ["1-sft.yaml", "2-more.yaml", "3-policy.yaml"]
    assert "path: stage:more" in documents[2] and "seed: 9" in documents[2] and "seed: 7" in documents[1]
    assert all(read_yaml(text.partition("\n")[2].encode(), "x")[1] == [] for text in documents)
    assert "2 steps over" in run("--dry-run", "train.max_steps=2")
    assert "3-policy.yaml" in run("policy.train.max_completion_length=400", status=2)
    assert len(run("more.train.sed=4", "~more.nothing", status=2).splitlines()) == 2
