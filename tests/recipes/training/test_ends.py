"""How a training ends that does not come to its end: figures that are not numbers, SIGTERM, disks that take nothing."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tuning import assert_equal_weights
from typer.testing import CliRunner

from anyformer.recipes.disk import write_fault
from anyformer.recipes.errors import Terminated, UserError
from anyformer.recipes.objectives.sft import trainer_class
from anyformer.recipes.progress import TrainingProgress
from anyformer.recipes.run import run_recipe
from anyformer.recipes.run_folder import RunFolder
from anyformer.recipes.training.unfinished import SAVING
from anyformer.scripts.cli import app

FAST = (
    "adapter={kind: none}",
    "eval.samples=0",
    "logging.plot=false",
    "train.learning_rate=1e-3",
    "train.save_steps=2",
)


@pytest.fixture
def at(monkeypatch):
    """A function: have something done at an event of the trainer when a step is reached."""

    def arrange(event, step, act):
        def run(self, args, state, control, **kwargs):
            if state.global_step == step:
                act(**kwargs)

        monkeypatch.setattr(TrainingProgress, event, run)

    return arrange


def names(folder):
    return [path.name for path in RunFolder(folder).checkpoints]


# Not a number


def test_a_loss_that_is_not_a_number_ends_the_run_before_it_is_learned_from(recipe, tmp_path, monkeypatch):
    """Of row 13 the loss is NaN, as a broken kernel would make it: step, micro-batch and rows are named."""
    import anyformer

    tokens = [[int(i) for i in ids] for ids in _tokenised(recipe(*FAST, "data.eval_fraction=0"))]
    seen: list[dict[str, torch.Tensor]] = []
    original = trainer_class().compute_loss

    def spoilt(self, model, inputs, *args, **kwargs):
        loss = original(self, model, inputs, *args, **kwargs)
        bad = any(ids[: len(tokens[13])].tolist() == tokens[13] for ids in inputs["input_ids"])
        if bad:
            seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return loss * float("nan") if bad else loss

    with monkeypatch.context() as patch:
        patch.setattr(trainer_class(), "compute_loss", spoilt)
        options = (*FAST, "data.eval_fraction=0", "train.gradient_accumulation_steps=2", "train.max_steps=20")
        options += ("train.per_device_train_batch_size=2", "train.save_steps=1", "eval.before=false")
        with pytest.raises(UserError) as told:
            run_recipe(recipe(*options))
    said = re.search(
        r"step (\d+): in micro-batch ([12]) of 2 the loss is nan, from rows (\d+), (\d+) of", str(told.value)
    )
    assert said and "13" in said.groups()[2:], told.value
    step, kept = int(said[1]), names(tmp_path / "run")
    assert step > 1 and kept[-1] == f"checkpoint-{step - 1}" and f"{kept[-1]} is whole" in str(told.value)
    # No weight has moved in the step, and the checkpoint holds them.
    saved = anyformer.AnyformerForCausalLM.from_pretrained(tmp_path / "run" / kept[-1]).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in seen[0].items())
    run_recipe(recipe(*options), resume=True)  # once the cause is gone it goes on


def _tokenised(recipe):
    from anyformer.recipes.prepare import prepare

    return prepare(recipe).train.dataset["input_ids"]


def test_rows_of_a_later_epoch_are_named(recipe, monkeypatch):
    """After an epoch of 12 steps, and behind a resume, the order is another."""
    tokens = [[int(i) for i in ids] for ids in _tokenised(recipe(*FAST, "data.eval_fraction=0"))]
    original, given = trainer_class().compute_loss, {}

    def spoilt(self, model, inputs, *args, **kwargs):
        loss = original(self, model, inputs, *args, **kwargs)
        if self.state.global_step == 16:
            lengths = inputs["attention_mask"].sum(-1).tolist()
            given["ids"] = [ids[:n].tolist() for ids, n in zip(inputs["input_ids"], lengths, strict=True)]
            return loss * float("inf")
        return loss

    options = (*FAST, "data.eval_fraction=0", "train.max_steps=20", "train.num_train_epochs=9", "eval.before=false")
    monkeypatch.setattr(trainer_class(), "compute_loss", spoilt)
    for resume in (False, True):
        with pytest.raises(UserError, match="step 17: in micro-batch 1 of 1 the loss is inf") as told:
            run_recipe(recipe(*options), resume=resume)
        found = [int(number) for number in re.search(r"from rows ([\d, ]+)", str(told.value))[1].split(", ")]
        assert sorted(tokens[row] for row in found) == sorted(given["ids"])


def test_a_gradient_that_overflows_ends_the_run(recipe, tmp_path, monkeypatch):
    original = trainer_class().compute_loss

    def steep(self, model, inputs, *args, **kwargs):
        loss = original(self, model, inputs, *args, **kwargs)
        return loss * 1e30 if self.state.global_step == 5 else loss  # the norm's squares are beyond float32

    monkeypatch.setattr(trainer_class(), "compute_loss", steep)
    with pytest.raises(UserError, match=r"step 6: the gradient norm is inf, from rows \d+, \d+, \d+, \d+ of"):
        run_recipe(recipe(*FAST))
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]


def test_weights_that_are_not_numbers_are_not_saved(recipe, tmp_path, at):
    def spoil(model, **kwargs):
        next(model.parameters()).data[0, 0] = float("nan")

    at("on_optimizer_step", 3, spoil)  # counted before it: after step 4
    with pytest.raises(UserError, match=r"step 4: the weights are not finite .*checkpoint-2 is whole, and --resume"):
        run_recipe(recipe(*FAST))
    assert names(tmp_path / "run") == ["checkpoint-2"] and not (tmp_path / "run" / SAVING).exists()


# SIGTERM


def terminate(**kwargs):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("step", [4, 5, 11], ids=["saved anyhow", "between", "last"])
def test_sigterm_leaves_a_checkpoint_of_the_step_and_status_143(recipe, tmp_path, at, monkeypatch, step):
    recipe()
    common = [*FAST, "model.config={attention_dropout: 0.1}", "train.eval_strategy=steps", "train.eval_steps=3"]
    whole = run_recipe(recipe(*common, f"train.output_dir={tmp_path / 'whole'}"))
    command = ["train", str(tmp_path / "recipe.yaml"), *common]
    monkeypatch.setattr(sys, "argv", ["anyformer", *command])
    at("on_step_begin", step, terminate)  # in the step after so many
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 143, done.output
    assert (
        f"Stopped by SIGTERM after step {step + 1}: checkpoint-{step + 1} is written. Go on with: anyformer tr"
        in done.output
    )
    assert done.stderr.rstrip().endswith("--resume")
    assert names(tmp_path / "run")[-1] == f"checkpoint-{step + 1}"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    at("on_step_begin", -1, terminate)
    done = CliRunner().invoke(app, [*command, "--resume"])
    assert done.exit_code == 0, done.output
    assert_equal_weights(whole, tmp_path / "run")


def test_sigterm_after_the_last_look_is_heeded_too(recipe, tmp_path, at):
    at("on_save", 12, terminate)
    with pytest.raises(Terminated, match="after step 12, the last one"):
        run_recipe(recipe(*FAST))
    assert names(tmp_path / "run")[-1] == "checkpoint-12" and not RunFolder(tmp_path / "run").finished


SECOND = """
import os, signal, sys, time
import anyformer.recipes.training.sigterm as module
module._SAME_REQUEST_SECONDS = 0.3
with module.Sigterm() as sigterm:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # a launcher's copy of the first
    assert sigterm.received
    print("noted", flush=True)
    if sys.argv[1] == "python":
        while True: pass
    time.sleep(0.4)
    signal.pthread_sigmask(signal.SIG_BLOCK, [])
    import ctypes
    ctypes.PyDLL(None).getpid()
    ctypes.CDLL(None).sleep(600)  # outside Python, as a collective that waits for ever
"""


@pytest.mark.parametrize("where", ["python", "elsewhere"])
def test_a_second_sigterm_ends_at_once(where):
    running = subprocess.Popen(
        [sys.executable, "-c", SECOND, where],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert running.stdout.readline() == "noted\n"
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.6)
    running.terminate()
    assert running.wait(60) == 143


# Disks


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 20 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return filler


@pytest.mark.parametrize("event", ["on_step_end", "on_train_end"], ids=["checkpoint", "result"])
def test_a_full_disk_is_an_error_of_one_line_and_loses_nothing(recipe, tmp_path, small_disk, at, event):
    step, folder = (8, small_disk / "run") if event == "on_step_end" else (12, small_disk / "run")
    recipe()
    whole = run_recipe(recipe(*FAST, f"train.output_dir={tmp_path / 'whole'}"))
    at(event, step, lambda **kwargs: fill(small_disk))
    command = ["train", str(tmp_path / "recipe.yaml"), *FAST, f"train.output_dir={folder}"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and "the disk is full" in done.output, done.output
    assert not (folder / SAVING).exists() and not (folder / "model.safetensors").exists()
    assert names(folder)[-1] == ("checkpoint-6" if step == 8 else "checkpoint-12")
    (small_disk / "filler").unlink()
    at(event, -1, terminate)
    done = CliRunner().invoke(app, [*command, "--resume"])
    assert done.exit_code == 0, done.output
    assert_equal_weights(whole, folder)


def test_a_limit_on_the_size_of_files_is_told(recipe, tmp_path, at):
    """The weights of a checkpoint fit, the optimizer's state, twice as large, does not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = {}

    def limit(**kwargs):
        size["weights"] = (tmp_path / "run" / "checkpoint-6" / "model.safetensors").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size["weights"] * 1.3), before[1]))

    at("on_step_end", 8, limit)
    try:
        with pytest.raises(
            UserError, match=r"no checkpoint can be written into .*: (a file would be larger|a file was cut)"
        ):
            run_recipe(recipe(*FAST))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path / "run")[-1] == "checkpoint-6" and not (tmp_path / "run" / SAVING).exists()


def test_a_folder_that_may_not_be_written_is_told(recipe, tmp_path, at):
    folder, user = tmp_path / "run", os.geteuid()

    def lock(**kwargs):
        folder.chmod(0o500)
        if user == 0:  # whom nothing is forbidden
            os.seteuid(65534)

    at("on_step_end", 8, lock)
    try:
        with pytest.raises(UserError, match=r"no checkpoint can be written into .*: this user may not write there"):
            run_recipe(recipe(*FAST))
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
    assert names(folder)[-1] == "checkpoint-6" and not (folder / SAVING).exists()


def test_other_errors_are_no_faults_of_writing():
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
        assert write_fault(OSError(number, os.strerror(number)))
    assert "full" in write_fault(RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"))
    for error in (OSError(errno.ENOENT, "no"), ValueError("No space left"), RuntimeError("shapes differ")):
        assert write_fault(error) == ""
