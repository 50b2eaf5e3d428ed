"""A run goes on from the checkpoint of any strategy with any other, and ends as the undisturbed run of one process."""

import shutil
from pathlib import Path

import pytest
from processes import Job, assert_same_run, run_jobs, stopped_at, write_recipe, write_texts

from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.run import run_recipe

pytestmark = pytest.mark.slow

STRATEGIES = ("one", "ddp", "fsdp2", "tp")
# From one process to several and back, and between the two ways of sharding; each strategy with its own as well.
PAIRS = [
    *((strategy, strategy) for strategy in STRATEGIES),
    *(("one", strategy) for strategy in STRATEGIES[1:]),
    *((strategy, "one") for strategy in STRATEGIES[1:]),
    ("fsdp2", "tp"),
    ("tp", "fsdp2"),
    ("fsdp2", "ddp"),
]


def stopped_at_ten(run: Path, copy: Path) -> Path:
    return stopped_at(run, copy, 10)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The recipe, and a finished run of each strategy."""
    root = tmp_path_factory.mktemp("begun")
    recipe = write_recipe(root, write_texts(root / "texts.jsonl"))
    jobs = {strategy: Job(recipe, root / strategy, strategy) for strategy in STRATEGIES}
    run_recipe(load_recipe(recipe, jobs["one"].as_dict()["overrides"]))
    assert not any(run_jobs([job for name, job in jobs.items() if name != "one"], root))
    return recipe, {name: job.folder for name, job in jobs.items()}


@pytest.fixture(scope="module")
def resumed(begun, tmp_path_factory):
    recipe, runs = begun
    root = tmp_path_factory.mktemp("resumed")
    jobs = []
    for first, second in PAIRS:
        folder = stopped_at_ten(runs[first], root / f"{first}-{second}")
        jobs.append(Job(recipe, folder, second, resume=True))
    for job in (job for job in jobs if job.strategy == "one"):
        run_recipe(load_recipe(recipe, job.as_dict()["overrides"]), resume=True)
    assert not any(run_jobs([job for job in jobs if job.strategy != "one"], root))
    return root


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_goes_on_with_another_strategy(begun, resumed, first, second):
    assert_same_run(begun[1]["one"], resumed / f"{first}-{second}")


def test_one_process_is_resumed_to_the_last_bit(begun, resumed):
    from safetensors.torch import load_file

    whole, again = (load_file(folder / "model.safetensors") for folder in (begun[1]["one"], resumed / "one-one"))
    assert all(whole[name].equal(again[name]) for name in whole)


def test_a_run_whose_last_step_is_saved_already_ends_without_training(begun, tmp_path):
    """As after a kill between the last checkpoint and the result."""
    recipe, runs = begun
    jobs = []
    for strategy in ("ddp", "fsdp2", "tp"):
        folder = stopped_at_ten(runs[strategy], tmp_path / strategy)
        shutil.copytree(runs[strategy] / "checkpoint-20", folder / "checkpoint-20")
        jobs.append(Job(recipe, folder, strategy, resume=True))
    assert not any(run_jobs(jobs, tmp_path))
    for job in jobs:
        assert_same_run(begun[1]["one"], job.folder)


def test_another_number_of_rows_a_step_is_refused(begun, tmp_path):
    recipe, runs = begun
    folder = stopped_at_ten(runs["one"], tmp_path / "run")
    with pytest.raises(UserError, match=r"train\.global_batch_size"):
        run_recipe(load_recipe(recipe, [f"train.output_dir={folder}", "train.global_batch_size=4"]), resume=True)


def test_without_a_global_batch_more_processes_are_refused(begun, tmp_path):
    """Each would read as many rows as before, and a step of two processes would be two steps."""
    recipe, _ = begun
    overrides = ["~train.global_batch_size", "train.per_device_train_batch_size=8"]
    one = Job(recipe, tmp_path / "one", "one", overrides)
    run_recipe(load_recipe(recipe, one.as_dict()["overrides"]))
    folder = stopped_at_ten(one.folder, tmp_path / "two")
    (said,) = run_jobs([Job(recipe, folder, "ddp", overrides, resume=True)], tmp_path)
    assert "8 rows a step, now it is 16" in said and "train.global_batch_size: 8" in said
