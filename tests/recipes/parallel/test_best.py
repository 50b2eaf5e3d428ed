"""The best checkpoint of a run in two processes: kept, and what the run ends with."""

import json

import pytest
from processes import SHIFTS, Job, run_jobs, stopped_at, weights, write_recipe, write_texts

pytestmark = pytest.mark.slow

STRATEGIES = ("ddp", "fsdp2", "tp")
COMMON = ["train.lr_scheduler_type=constant", "eval.samples=0", "train.max_steps=10", "train.save_total_limit=3"]
BEST = [*COMMON, "train.load_best_model_at_end=true", "train.metric_for_best_model=loss", "train.eval_strategy=steps"]
BEST += ["train.eval_steps=2", "train.save_steps=2"]
# Of runs that go on with another strategy: at the end they read a best checkpoint that the first one wrote.
PAIRS = [("ddp", "fsdp2"), ("ddp", "tp"), ("fsdp2", "ddp"), ("tp", "fsdp2")]


def apart(one, other):
    """The largest difference of two folders' weights."""
    expected, got = weights(one), weights(other)
    assert expected.keys() == got.keys() and expected
    return max(float((expected[n] - got[n]).abs().max()) for n in expected if not n.endswith(SHIFTS))


@pytest.fixture(scope="module")
def runs(zygote, tmp_path_factory):
    """The folder of all: one process that ended at step 4 and one at step 10, and each strategy's run with its best."""
    root = tmp_path_factory.mktemp("best")
    recipe = write_recipe(root, write_texts(root / "texts.jsonl"))
    ends = [Job(recipe, root / f"one {n}", "one", [*COMMON, f"train.max_steps={n}"]) for n in (4, 10)]
    assert run_jobs(ends, root, processes=1, zygote=zygote) == ["", ""]
    jobs = [Job(recipe, root / s, s, BEST, fault="best at four") for s in STRATEGIES]
    assert run_jobs(jobs, root, zygote=zygote) == [""] * 3
    return root


@pytest.fixture(scope="module")
def resumed(runs, zygote):
    """Runs that go on: after their last step, which is saved, and before it, with another strategy."""
    jobs = []
    for strategy in STRATEGIES:
        folder = stopped_at(runs / strategy, runs / f"{strategy} ended", 10)
        jobs.append(Job(runs / "recipe.yaml", folder, strategy, BEST, resume=True, fault="best at four"))
    for first, second in PAIRS:
        folder = stopped_at(runs / first, runs / f"{first} {second}", 8)
        jobs.append(Job(runs / "recipe.yaml", folder, second, BEST, resume=True, fault="best at four"))
    assert run_jobs(jobs, runs, zygote=zygote) == [""] * len(jobs)
    return runs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_best_is_kept_and_is_the_result(runs, strategy):
    kept = sorted(path.name for path in (runs / strategy).glob("checkpoint-*"))
    assert kept == ["checkpoint-10", "checkpoint-4", "checkpoint-8"]
    state = json.loads((runs / strategy / "checkpoint-10" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 4
    assert state["best_model_checkpoint"] == str(runs / strategy / "checkpoint-4")
    assert apart(runs / "one 4", runs / strategy) < 1e-4 < 1e-3 < apart(runs / "one 10", runs / strategy)
    measured = [json.loads((runs / f / "metrics.json").read_text())["after"]["loss"] for f in ("one 4", strategy)]
    assert measured[0] == pytest.approx(measured[1], abs=1e-5)


@pytest.mark.parametrize("name", [f"{s} ended" for s in STRATEGIES] + [" ".join(pair) for pair in PAIRS])
def test_a_resumed_run_ends_with_the_best_too(resumed, name):
    assert (resumed / name / "checkpoint-4").is_dir()
    assert apart(resumed / "one 4", resumed / name) < 1e-4


def test_a_best_one_that_is_damaged_ends_the_run(runs, zygote, tmp_path):
    folder = stopped_at(runs / "fsdp2", tmp_path / "run", 8)
    (shard,) = (folder / "checkpoint-4" / "pytorch_model_fsdp_0").glob("__1_*")
    shard.write_bytes(bytes(shard.stat().st_size))
    job = Job(runs / "recipe.yaml", folder, "fsdp2", BEST, resume=True, fault="best at four")
    (said,) = run_jobs([job], tmp_path, zygote=zygote)
    assert f"the best checkpoint {folder / 'checkpoint-4'} cannot be loaded: pytorch_model_fsdp_0/__1_0" in said
