"""Three and four processes: the run of one."""

import pytest
from processes import Job, assert_same_run, run_jobs, stopped_at, write_recipe, write_texts

pytestmark = pytest.mark.slow

STEPS = 6
# 12 rows a step, for three and for four; the last step of an epoch of 32 rows is not full.
SHORT = [f"train.max_steps={STEPS}", "train.global_batch_size=12", "train.save_steps=3", "eval.samples=0"]
SIZES = "num_hidden_layers: 2, max_position_embeddings: 64, initializer_range: 0.3"
# No size is a multiple of 3 or of 4.
ODD = f"hidden_size: 50, num_attention_heads: 5, num_key_value_heads: 5, intermediate_size: 70, {SIZES}"
THIRDS = f"hidden_size: 48, num_attention_heads: 6, num_key_value_heads: 3, intermediate_size: 96, {SIZES}"
FOURTHS = f"hidden_size: 32, num_attention_heads: 8, num_key_value_heads: 4, intermediate_size: 64, {SIZES}"
CONFIGS = {"odd": ODD, "thirds": f"{THIRDS}, vocab_size: 261", "fourths": FOURTHS}
RUNS = {
    3: [("odd", "ddp"), ("odd", "fsdp2"), ("thirds", "tp")],
    4: [("odd", "ddp"), ("odd", "fsdp2"), ("fourths", "tp")],
}


def overrides(config):
    return [*SHORT, f"model.config={{{CONFIGS[config]}}}"]


@pytest.fixture(scope="module")
def runs(zygote, tmp_path_factory):
    root = tmp_path_factory.mktemp("more")
    recipe = write_recipe(root, write_texts(root / "texts.jsonl"))
    alone = [Job(recipe, root / f"{config} one", "one", overrides(config)) for config in CONFIGS]
    assert not any(run_jobs(alone, root, processes=1, zygote=zygote))
    for count, chosen in RUNS.items():
        jobs = [Job(recipe, root / f"{c} {s} {count}", s, overrides(c)) for c, s in chosen]
        assert run_jobs(jobs, root, processes=count, zygote=zygote) == [""] * len(jobs)
    return root


@pytest.mark.parametrize(("count", "config", "strategy"), [(n, *pair) for n, pairs in RUNS.items() for pair in pairs])
def test_as_many_processes_train_what_one_does(runs, count, config, strategy):
    assert_same_run(runs / f"{config} one", runs / f"{config} {strategy} {count}", steps=STEPS)


def test_rows_that_three_cannot_share_are_refused(runs, zygote, tmp_path):
    job = Job(runs / "recipe.yaml", tmp_path / "run", "ddp", ["train.global_batch_size=8"])
    (said,) = run_jobs([job], tmp_path, processes=3, zygote=zygote)
    assert "8 rows a step cannot be shared by 3 processes: it must be a multiple of 3" in said


def test_a_run_of_one_goes_on_in_three_and_of_three_in_four(runs, zygote, tmp_path):
    """Sharded parts that do not match: each process reads what is its own now."""
    for first, count in (("odd one", 3), ("odd fsdp2 3", 4)):
        folder = stopped_at(runs / first, tmp_path / str(count), 3)
        job = Job(runs / "recipe.yaml", folder, "fsdp2", overrides("odd"), resume=True)
        assert run_jobs([job], tmp_path, processes=count, zygote=zygote) == [""]
        assert_same_run(runs / "odd one", folder, steps=STEPS)
