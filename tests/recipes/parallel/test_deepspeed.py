"""DeepSpeed, where it is installed: ZeRO gives the run of one process, on CPUs as well, and its settings are whole."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import (
    Job,
    assert_same_run,
    figures,
    run_jobs,
    weights,
    write_recipe,
    write_texts,
)
from test_launch import anyformer, spread
from test_resume import stopped_at_ten
from test_same_run import EXPERTS, OTHERS, SMALL_BATCH, TUNING

from anyformer.recipes.loading import load_recipe
from anyformer.recipes.parallel.zero import shares_work
from anyformer.recipes.run import run_recipe

pytest.importorskip("deepspeed", reason="the package deepspeed is not installed")
pytestmark = pytest.mark.slow

# Parameters under 100,000 elements stay whole in DeepSpeed's own settings: here none does.
SPLIT_ALL = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
STAGES = {"stage 3": SPLIT_ALL, "stage 2": {"stage": 2}}
VARIANTS = {
    "grouped heads": [],
    "accumulated": [SMALL_BATCH],
    "tied": ["model.config.tie_word_embeddings=true"],
    "experts": EXPERTS,
    "evaluated": ["train.eval_strategy=steps", "train.eval_steps=5", "train.load_best_model_at_end=true"],
}


def settings(monkeypatch, folder: Path, zero: dict) -> None:
    """Let processes take a file of DeepSpeed's, as `deepspeed_config_file` in Accelerate's file does."""
    file = folder / "zero.json"
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    file.write_text(json.dumps(config | dict.fromkeys(automatic, "auto")), encoding="utf-8")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("deepspeed")
    return write_recipe(root, write_texts(root / "texts.jsonl"))


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory):
    """Folders of the runs of one process without DeepSpeed, by variant."""
    root = tmp_path_factory.mktemp("alone")
    jobs = {name: Job(recipe, root / name.replace(" ", "-"), "one", overrides) for name, overrides in VARIANTS.items()}
    for job in jobs.values():
        run_recipe(load_recipe(recipe, job.as_dict()["overrides"]))
    return {name: job.folder for name, job in jobs.items()}


@pytest.fixture(scope="module")
def split(recipe, tmp_path_factory, module_patch):
    """Folders of the same runs in two processes, by stage and variant."""
    root, found = tmp_path_factory.mktemp("split"), {}
    for stage, zero in STAGES.items():
        folder = root / stage.replace(" ", "-")
        folder.mkdir()
        with module_patch.context() as patch:
            settings(patch, folder, zero)
            jobs = [Job(recipe, folder / n.replace(" ", "-"), "deepspeed", more) for n, more in VARIANTS.items()]
            assert not any(run_jobs(jobs, folder))
        found |= {(stage, name): job.folder for name, job in zip(VARIANTS, jobs, strict=True)}
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stage", STAGES)
def test_zero_trains_as_one_process_does(alone, split, stage, variant):
    run = split[stage, variant]
    assert spread(run) == ("deepspeed", 2)
    assert_same_run(alone[variant], run)
    names = [{path.name for path in folder.iterdir()} for folder in (alone[variant], run)]
    assert names[0] == names[1]
    assert (run / "config.json").read_text() == (alone[variant] / "config.json").read_text()


@pytest.mark.parametrize("processes", [1, 2])
def test_launch_with_the_shipped_file(recipe, alone, tmp_path, processes):
    to = f"train.output_dir={tmp_path / 'run'}"
    done = anyformer("train", str(recipe), to, "--launch", "deepspeed", "--processes", str(processes))
    assert done.returncode == 0, done.stderr
    assert spread(tmp_path / "run") == ("deepspeed", processes)
    assert_same_run(alone["grouped heads"], tmp_path / "run")
    assert "FutureWarning" not in done.stdout + done.stderr
    assert done.stdout.count("Held out, after training") == 1


def test_sixteen_bits_are_the_recipes_choice_and_the_result_is_in_fp32(recipe, alone, tmp_path):
    job = Job(recipe, tmp_path / "run", "deepspeed", ["train.bf16=true"])
    assert run_jobs([job], tmp_path) == [""]
    expected, got = figures(alone["grouped heads"], "loss"), figures(job.folder, "loss")
    apart = max(abs(a - b) / a for a, b in zip(expected, got, strict=True))
    assert 0 < apart < 2**-7  # bf16 has 8 bits of mantissa
    held = weights(job.folder)
    assert all(tensor.dtype is torch.float32 for tensor in held.values())
    # The masters, which are no multiples of what bf16 can hold.
    assert any((tensor != tensor.bfloat16()).any() for tensor in held.values())


# Resuming


@pytest.fixture(scope="module")
def resumed(recipe, alone, tmp_path_factory):
    """A finished run of the shipped file, and runs that go on from its checkpoints; what those said that could not."""
    root = tmp_path_factory.mktemp("resumed")
    first = Job(recipe, root / "first", "deepspeed")
    assert run_jobs([first], root) == [""]
    middle = Job(recipe, stopped_at_ten(first.folder, root / "middle"), "deepspeed", resume=True)
    end = Job(recipe, stopped_at_ten(first.folder, root / "end"), "deepspeed", resume=True)
    shutil.copytree(first.folder / "checkpoint-20", end.folder / "checkpoint-20")
    refused = [
        Job(recipe, stopped_at_ten(first.folder, root / "by-ddp"), "ddp", resume=True),
        Job(recipe, stopped_at_ten(alone["grouped heads"], root / "of-one"), "deepspeed", resume=True),
    ]
    said = run_jobs([middle, end, *refused], root)
    assert said[:2] == ["", ""], said
    fewer = Job(recipe, stopped_at_ten(first.folder, root / "fewer"), "deepspeed", resume=True)
    (alone_said,) = run_jobs([fewer], root, processes=1)
    folders = {job.folder.name: job.folder for job in (first, middle, end)}
    return folders, dict(zip(("by-ddp", "of-one", "fewer"), [*said[2:], alone_said], strict=True))


@pytest.mark.parametrize("name", ["first", "middle", "end"])
def test_a_run_goes_on_where_it_was(alone, resumed, name):
    """Also one whose last step is saved, which has no engine made again."""
    assert_same_run(alone["grouped heads"], resumed[0][name])
    first, again = weights(resumed[0]["first"]), weights(resumed[0][name])
    assert all((first[key] - again[key]).abs().max() <= 1e-6 for key in first)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("by-ddp", "was written by DeepSpeed, whose checkpoints only it reads: go on with --launch deepspeed"),
        ("of-one", "was written by another strategy, whose checkpoints only it reads: go on without --launch"),
        ("fewer", "was written by DeepSpeed in 2 processes, each its part of the optimiser's state: go on with"),
    ],
)
def test_what_cannot_go_on_says_what_can(resumed, name, expected):
    assert expected in resumed[1][name]


def test_a_run_that_deepspeed_does_not_split_is_stopped(recipe, tmp_path):
    job = Job(recipe, tmp_path / "run", "deepspeed", fault="deepspeed silently DDP")
    (said,) = run_jobs([job], tmp_path)
    assert "DeepSpeed, as its config file says was asked for, but in force is 2 processes, data parallel" in said


@pytest.mark.parametrize(("counted", "stage", "split_by"), [(1, 3, "ds_tensor"), (2, 3, "nothing")])
def test_an_engine_must_count_all_processes_and_split(counted, stage, split_by):
    module = torch.nn.Linear(2, 2)
    for parameter in module.parameters():
        setattr(parameter, split_by, parameter.detach()[:1])
    engine = SimpleNamespace(module=module, dp_world_size=counted, zero_optimization_stage=lambda: stage)
    assert not shares_work(engine, 2)
    for parameter in module.parameters():
        parameter.ds_tensor = parameter.detach()[:1]
    engine.dp_world_size = 2
    assert shares_work(engine, 2)


# Adapters

TUNED = {
    "lora": [],
    "lora and an embedding": ["adapter.modules_to_save=[embed_tokens]"],
    "qlora": ["model.quantization={load_in_4bit: true, bnb_4bit_quant_type: nf4}"],
    "frozen parts": ["adapter={kind: freeze, train: [attention]}"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_adapters(tmp_path, monkeypatch, tiny_checkpoint, stage):
    """On a base that is read from its folder."""
    rows = tmp_path / "rows.jsonl"
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    pairs = [(f"count from {words[i % 7]}", " ".join(words[i % 7 : i % 7 + 2 + i % 3])) for i in range(45)]
    rows.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs), encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TUNING.format(base=tiny_checkpoint, rows=rows), encoding="utf-8")
    jobs = [Job(recipe, tmp_path / name.replace(" ", "-"), "deepspeed", more) for name, more in TUNED.items()]
    settings(monkeypatch, tmp_path, STAGES[stage])
    assert not any(run_jobs(jobs, tmp_path))
    again = Job(recipe, stopped_at_ten(jobs[0].folder, tmp_path / "again"), "deepspeed", resume=True)
    last = Job(recipe, stopped_at_ten(jobs[0].folder, tmp_path / "last"), "deepspeed", resume=True)
    shutil.copytree(jobs[0].folder / "checkpoint-20", last.folder / "checkpoint-20")
    assert run_jobs([again, last], tmp_path) == ["", ""]
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    for job in jobs:
        one = Job(recipe, job.folder.with_name(f"one-{job.folder.name}"), "one", job.overrides)
        run_recipe(load_recipe(recipe, one.as_dict()["overrides"]))
        assert_same_run(one.folder, job.folder)
    for job in (again, last):
        assert_same_run(jobs[0].folder, job.folder)


@pytest.mark.parametrize("kind", OTHERS)
def test_encoders_and_encoder_decoders(tmp_path, monkeypatch, minilm_folder, kind):
    """Also an embedding that encoder and decoder share."""
    from small_recipes import SMALL

    recipe = tmp_path / "recipe.yaml"
    text = OTHERS[kind].replace("ENCODER", str(minilm_folder)).replace("FOLDER", str(SMALL))
    train = "max_steps: 20, warmup_steps: 1, per_device_train_batch_size: 2, global_batch_size: 4, logging_steps: 1"
    recipe.write_text(
        f"extends: {kind}\n{text}train: {{{train}, learning_rate: 1e-3, bf16: false, use_cpu: true}}\n"
        "eval: {samples: 1, max_new_tokens: 4}\nlogging: {plot: false}\n",
        encoding="utf-8",
    )
    one, split = (Job(recipe, tmp_path / strategy, strategy) for strategy in ("one", "deepspeed"))
    run_recipe(load_recipe(recipe, one.as_dict()["overrides"]))
    settings(monkeypatch, tmp_path, SPLIT_ALL)
    assert run_jobs([split], tmp_path) == [""]
    assert_same_run(one.folder, split.folder)
