"""The newest checkpoint of a sharded run is broken: it is passed over where that can be known, and else named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Job, assert_same_run, run_jobs, stopped_at, write_recipe, write_texts

from anyformer.recipes.training.manifest import MANIFEST

pytestmark = pytest.mark.slow

STEPS = ["train.max_steps=6", "train.save_steps=2", "eval.samples=0"]
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def blank_beginning(path: Path) -> None:
    """The first tensor's file is gone, the end of the last one is as it was."""
    path.write_bytes(bytes(300) + path.read_bytes()[300:])


def without_list(spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        spoil(folder)
        (folder / MANIFEST).unlink()

    return both


# What is done to the newest checkpoint, and what is said of it.
PASSED_OVER = {
    "a shard cut": (lambda f: cut(f / MODEL / "__1_0.distcp"), f"{MODEL}/__1_0.distcp is missing or damaged"),
    "a byte of a shard": (
        lambda f: blank_beginning(f / OPTIMIZER / "__0_0.distcp"),
        f"{OPTIMIZER}/__0_0.distcp is damaged: its",
    ),
    "the list cut": (lambda f: cut(f / MANIFEST), f"{MANIFEST} is damaged"),
    "no list and a shard cut": (
        without_list(lambda f: cut(f / OPTIMIZER / "__1_0.distcp")),
        f"{OPTIMIZER} is missing or damaged",
    ),
    "no list and no shard of one": (
        without_list(lambda f: (f / MODEL / "__1_0.distcp").unlink()),
        f"{MODEL} is missing or damaged",
    ),
    "no list and no random state of one": (
        without_list(lambda f: (f / "rng_state_1.pth").unlink()),
        "rng_state_1.pth is missing or damaged",
    ),
}
# Nobody can know before it is read.
NOT_KNOWN = {
    "no list and a blank shard": without_list(lambda f: blank_beginning(f / MODEL / "__0_0.distcp")),
    "no list and a blank state": without_list(lambda f: blank_beginning(f / OPTIMIZER / "__1_0.distcp")),
    "no list and metadata cut": without_list(lambda f: cut(f / MODEL / ".metadata")),
    "no list and a blank schedule": without_list(lambda f: blank_beginning(f / "scheduler.pt")),
}


def stopped(run: Path, copy: Path, spoil: Callable[[Path], object]) -> Path:
    """A run folder as it was after its fourth step, with the newest checkpoint spoiled."""
    spoil(stopped_at(run, copy, 4) / "checkpoint-4")
    return copy


@pytest.fixture(scope="module")
def resumed(zygote, tmp_path_factory):
    """The folder of all runs, and what was said in each resumed one: on the console, and as an error."""
    root = tmp_path_factory.mktemp("broken")
    recipe = write_recipe(root, write_texts(root / "texts.jsonl"))
    whole = Job(recipe, root / "whole", "fsdp2", STEPS)
    assert run_jobs([whole], root, zygote=zygote) == [""]
    spoils = {name: spoil for name, (spoil, _) in PASSED_OVER.items()} | NOT_KNOWN
    jobs = [
        Job(recipe, stopped(whole.folder, root / name, spoil), "fsdp2", STEPS, resume=True)
        for name, spoil in spoils.items()
    ]
    errors = run_jobs(jobs, root, zygote=zygote)
    return root, zygote.log.read_text(), dict(zip(spoils, errors, strict=True))


@pytest.mark.parametrize("name", PASSED_OVER)
def test_it_is_passed_over_with_a_warning(resumed, name):
    root, console, errors = resumed
    assert errors[name] == ""
    assert f"Warning: checkpoint-4 is passed over: {PASSED_OVER[name][1]}" in console.replace("\n", " ")
    assert_same_run(root / "whole", root / name, steps=6)


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_it_is_named_where_it_cannot_be_read(resumed, name):
    root, _, errors = resumed
    assert errors[name].startswith(f"{root / name / 'checkpoint-4'} cannot be read and has no {MANIFEST}")
    assert "Remove it to go on from the one before it" in errors[name]


def test_it_goes_on_once_the_named_one_is_removed(resumed, zygote, tmp_path):
    root = resumed[0]
    folder = root / next(iter(NOT_KNOWN))
    shutil.rmtree(folder / "checkpoint-4")
    job = Job(root / "recipe.yaml", folder, "fsdp2", STEPS, resume=True)
    assert run_jobs([job], tmp_path, zygote=zygote) == [""]
    assert_same_run(root / "whole", folder, steps=6)


def test_none_that_is_whole_is_an_error(resumed, zygote, tmp_path):
    root = resumed[0]
    folder = stopped(root / "whole", tmp_path / "run", lambda f: cut(f / MODEL / "__1_0.distcp"))
    blank_beginning(folder / "checkpoint-2" / OPTIMIZER / "__0_0.distcp")
    job = Job(root / "recipe.yaml", folder, "fsdp2", STEPS, resume=True)
    (said,) = run_jobs([job], tmp_path, zygote=zygote)
    assert "holds no checkpoint to resume from (checkpoint-4: " in said and "checkpoint-2: optimizer_0/__0_0" in said
