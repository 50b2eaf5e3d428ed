"""Two processes on gloo: killed and gone on with, and ending together whatever happens in one of them."""

import re
import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from killing import moments
from safetensors.torch import load_file

from anyformer.recipes.run_folder import RunFolder
from anyformer.recipes.training.unfinished import SAVING

# Its engine writes checkpoints of its own, and makes its step within the backward pass.
NO_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
DEEPSPEED = (pytest.mark.slow, NO_DEEPSPEED)
SPOIL = str(Path(__file__).with_name("spoil.py"))
FAST = ["adapter={kind: none}", "model.config={attention_dropout: 0.1}", "train.learning_rate=1e-3"]
FAST += ["eval.samples=0", "data.eval_fraction=0", "model.verify_import=false", "logging.plot=false"]
FAST += ["train.max_steps=12", "train.save_steps=2", "train.per_device_train_batch_size=2"]
# Sizes that two processes share evenly, as those of the checkpoint are not.
EVEN = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 64"
EVEN = f"model={{preset: mini-gpt, tokenizer: builtin:bytes, config: {{{EVEN}, attention_dropout: 0.1}}}}"


@pytest.fixture
def command(recipe, tmp_path):
    """A function: arguments of `anyformer` for a run into a folder."""
    recipe()  # writes the file
    start = ["train", str(tmp_path / "recipe.yaml"), *FAST]
    return lambda folder, *more: [*start, f"train.output_dir={folder}", *more]


def assert_same(whole: Path, other: Path) -> None:
    expected, got = (load_file(folder / "model.safetensors") for folder in (whole, other))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-6)


def steps(run: Path) -> list[str]:
    return [folder.name for folder in RunFolder(run).checkpoints]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp", pytest.param("deepspeed", marks=NO_DEEPSPEED)])
def test_two_processes_killed_at_random_moments(zygote, command, tmp_path, strategy):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    launch, started = ["--launch", strategy, *([EVEN] if strategy == "tp" else [])], time.monotonic()
    assert zygote.run(command(whole, *launch), processes=2) == [0, 0], zygote.log.read_text()[-4000:]
    left = moments(4, time.monotonic() - started, killed / SAVING / "checkpoint-*", seed=3)
    while left:
        if zygote.killed(left[0](), command(killed, *launch, "--resume"), processes=2):
            del left[0]
        else:
            assert_same(whole, killed)
            shutil.rmtree(killed)
    if not RunFolder(killed).finished:
        done = zygote.run(command(killed, *launch, "--resume"), processes=2)
        assert done == [0, 0], zygote.log.read_text()[-4000:]
    assert_same(whole, killed)
    assert not list(killed.glob(".[!a]*"))  # the marker alone is hidden


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("deepspeed", marks=DEEPSPEED)]
)
def test_a_sigterm_that_one_process_gets_stops_both(zygote, command, tmp_path, strategy):
    run, launch = tmp_path / "run", ["--launch", strategy]
    spoilt = zygote.run(["terminate", "1", "4", *command(run, *launch)], script=SPOIL, processes=2)
    assert spoilt == [143, 143], zygote.log.read_text()[-4000:]
    assert steps(run)[-1] == "checkpoint-5"  # it is agreed upon in the next step
    assert zygote.log.read_text().count("Stopped by SIGTERM after step 5: checkpoint-5 is written.") == 1


# Under DDP only the first process writes anything large.
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [
        ("ddp", 0),
        pytest.param("fsdp2", 0, marks=SLOW),
        pytest.param("fsdp2", 1, marks=SLOW),
        pytest.param("deepspeed", 0, marks=DEEPSPEED),
        pytest.param("deepspeed", 1, marks=DEEPSPEED),
    ],
)
def test_a_disk_that_is_full_for_one_process_ends_both(zygote, command, tmp_path, strategy, rank):
    run, launch = tmp_path / "run", ["--launch", strategy]
    spoilt = zygote.run(["limit", str(rank), "4", *command(run, *launch)], script=SPOIL, processes=2)
    assert 2 in spoilt and 0 not in spoilt, zygote.log.read_text()[-4000:]
    assert "no checkpoint can be written into" in zygote.log.read_text()
    assert steps(run)[-1] == "checkpoint-2" and not (run / SAVING).exists()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("deepspeed", marks=DEEPSPEED)])
def test_a_loss_that_is_not_a_number_in_one_process_ends_both(zygote, command, tmp_path, strategy):
    run = tmp_path / "run"
    spoilt = zygote.run(["nan", "1", "5", *command(run, "--launch", strategy)], script=SPOIL, processes=2)
    assert spoilt == [2, 2], zygote.log.read_text()[-4000:]
    said = zygote.log.read_text()
    named = re.search(r"step 6: in micro-batch 1 of 1 of process 1 the loss is nan, from rows (\d+), (\d+) of", said)
    held = re.findall(r"count (\d+) from", re.search("spoilt: .*", said)[0])  # each row says which it is
    assert len(held) == 2 and sorted(named.groups()) == sorted(held)
    assert ("no weight was changed by it" if strategy == "ddp" else "its step is lost") in said
    assert "checkpoint-4 is whole" in said and steps(run)[-1] == "checkpoint-4"
