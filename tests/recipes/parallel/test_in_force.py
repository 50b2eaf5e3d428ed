"""A run that is not spread as asked ends before its first step."""

from types import SimpleNamespace

import pytest
import torch
from processes import Job, run_jobs, write_recipe, write_texts

from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.parallel.in_force import check, strategy_of
from anyformer.recipes.parallel.limits import check_splits
from anyformer.recipes.parallel.strategy import Parallel
from anyformer.recipes.run import run_recipe


def trainer_of(model):
    return SimpleNamespace(model=model, model_wrapped=model, is_deepspeed_enabled=False)


def test_one_process_is_told_from_several():
    trainer = trainer_of(torch.nn.Linear(2, 2))
    assert strategy_of(trainer, 1) == "one"
    check(trainer, Parallel(), {"recipe": "a"})
    for strategy in ("ddp", "fsdp2", "tp", "deepspeed"):
        with pytest.raises(UserError, match=r"but in force is one process\. Nothing was trained"):
            check(trainer, Parallel(strategy, 2, 0), {})


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What runs said that were spoiled, by the fault, see `worker.SPOILED`."""
    root = tmp_path_factory.mktemp("force")
    recipe = write_recipe(root, write_texts(root / "texts.jsonl"))
    faults = {
        "fsdp silently DDP": "fsdp2",
        "apart": "ddp",
        "another recipe": "ddp",
        "nobody asked": "one",
    }
    jobs = [Job(recipe, root / name.replace(" ", "-"), strategy, fault=name) for name, strategy in faults.items()]
    return dict(zip(faults, run_jobs(jobs, root), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        # What Accelerate does with an FSDP file on CPUs.
        (
            "fsdp silently DDP",
            "(FSDP2): a part of each weight in each was asked for, but in force is 2 processes, data",
        ),
        # What it does there without `use_cpu`: each trains for itself.
        ("apart", "was asked for, but in force is "),
        ("another recipe", "process 1 has another recipe than process 0"),
        ("nobody asked", "one process was asked for, but in force is "),
    ],
)
def test_planted_faults_are_found(said, fault, expected):
    assert expected in said[fault]


@pytest.mark.parametrize(
    ("overrides", "strategy", "expected"),
    [
        (
            ["adapter={kind: prompt-tuning, num_virtual_tokens: 4}"],
            "fsdp2",
            "a soft prompt is read as a whole: use ddp",
        ),
        (["adapter={kind: lora, r: 4}"], "tp", "--launch tp trains whole weights"),
        (["model.config.num_key_value_heads=1"], "tp", "num_key_value_heads is 1, which 2 processes cannot share"),
        (["model.config.position_embedding=alibi"], "tp", "position_embedding: alibi"),
        (["model.config.qk_norm=full"], "tp", "qk_norm: full"),
        (["model.config.vocab_size=261"], "tp", "vocab_size is 261"),
        (["train.optim=adafactor"], "fsdp2", "optim: adafactor was not made for weights that are split"),
        (["train.optim=adafactor"], "deepspeed", "optim: adafactor was not made for weights that are split"),
        (["train.optim=muon"], "deepspeed", "muon needs whole matrices, which --launch deepspeed takes apart"),
        (["train.average_tokens_across_devices=false"], "ddp", "weighs each process alike"),
        (["train.accelerator_config={split_batches: true}"], "ddp", "split_batches deals out rows in another way"),
    ],
)
def test_what_cannot_be_spread_is_refused_with_the_plan(tmp_path, monkeypatch, overrides, strategy, expected):
    from anyformer.recipes.parallel import world

    recipe = write_recipe(tmp_path, write_texts(tmp_path / "texts.jsonl"))
    loaded = load_recipe(recipe, [*overrides, f"train.output_dir={tmp_path / 'run'}", "train.use_cpu=true"])
    monkeypatch.setattr(world, "_current", Parallel(strategy, 2, 0))
    monkeypatch.setattr(world, "wait", lambda: None)
    with pytest.raises(UserError, match=expected.replace("(", r"\(")):
        run_recipe(loaded, dry_run=True)


def test_an_encoder_decoder_has_no_plan():
    config = SimpleNamespace(architecture="encoder-decoder")
    with pytest.raises(UserError, match="no plan of how to split an encoder-decoder"):
        check_splits(config, 2)
