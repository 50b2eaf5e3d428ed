"""Compiling and activation checkpointing in two processes: the run of one process without them."""

import json

import pytest
from processes import Job, assert_same_run, run_jobs, stopped_at, write_recipe, write_texts

from anyformer.recipes.flight_checks import PASSED

pytestmark = pytest.mark.slow

STEPS = 4
SHORT = [f"train.max_steps={STEPS}", "train.save_steps=2", "eval.samples=0"]
# Writing and compiling C++ for the graphs would take minutes: they are traced, differentiated and run as they are.
COMPILED = ["train.torch_compile=true", "train.torch_compile_backend=aot_eager"]
CHECKPOINTED = ["train.activation_checkpointing=true"]
OPTIONS = {
    "compiled": COMPILED,
    "checkpointed": CHECKPOINTED,
    "some layers checkpointed": [*CHECKPOINTED, "train.activation_checkpointing_kwargs={every_n_layers: 2}"],
    "both": [*COMPILED, *CHECKPOINTED],
}
CHECKED = ("ddp", "fsdp2", "tp")
RUNS = [(name, strategy) for name in OPTIONS for strategy in ("ddp", "fsdp2") if (name, strategy) != ("both", "ddp")]


def job(recipe, folder, strategy, name, *more, **options):
    """Where the recipe compiles, the run must have done so."""
    fault = "is compiled" if "train.torch_compile=true" in OPTIONS[name] else ""
    return Job(recipe, folder, strategy, [*SHORT, *OPTIONS[name], *more], fault=fault, **options)


@pytest.fixture(scope="module")
def runs(zygote, tmp_path_factory):
    """The folder of all runs."""
    root = tmp_path_factory.mktemp("options")
    recipe = write_recipe(root, write_texts(root / "texts.jsonl"))
    jobs = [job(recipe, root / f"{name} {strategy}", strategy, name) for name, strategy in RUNS]
    jobs += [Job(recipe, root / f"checked {strategy}", strategy, SHORT, check=True) for strategy in CHECKED]
    assert run_jobs([Job(recipe, root / "one", "one", SHORT)], root, zygote=zygote, processes=1) == [""]
    assert run_jobs(jobs, root, zygote=zygote) == [""] * len(jobs)
    return root


@pytest.mark.parametrize(("name", "strategy"), RUNS)
def test_losses_and_weights_are_those_of_one_process_without(runs, name, strategy):
    assert_same_run(runs / "one", runs / f"{name} {strategy}", steps=STEPS)


@pytest.mark.parametrize("strategy", CHECKED)
def test_the_costly_checks_pass_and_change_nothing(runs, strategy):
    assert_same_run(runs / "one", runs / f"checked {strategy}", steps=STEPS)
    checks = json.loads((runs / f"checked {strategy}" / "metrics.json").read_text(encoding="utf-8"))["checks"]
    assert PASSED in checks.values()


def test_a_compiled_and_sharded_run_goes_on_and_answers(runs, zygote, tmp_path):
    """From a checkpoint of its own, whose names know nothing of the compiler's wrapper."""
    folder = stopped_at(runs / "compiled fsdp2", tmp_path / "run", 2)
    again = job(runs / "recipe.yaml", folder, "fsdp2", "compiled", "eval.samples=1", resume=True)
    assert run_jobs([again], tmp_path, zygote=zygote) == [""]
    assert_same_run(runs / "one", folder, steps=STEPS)
    assert json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["samples_after"]
