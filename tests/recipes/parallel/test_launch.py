"""`--launch`, `accelerate launch` and torchrun: what they start, and how they end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import environment, figures, free_port, write_recipe, write_texts

from anyformer.recipes.parallel.strategy import launch_file

SHORT = ["train.max_steps=2", "train.save_steps=2", "eval.samples=0"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("launch")
    return write_recipe(root, write_texts(root / "texts.jsonl"))


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**environment(), **more},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def anyformer(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(["-m", "anyformer", *arguments])


def spread(folder: Path) -> tuple[str, int]:
    """The strategy and the number of processes that a finished run was spread over."""
    assert figures(folder, "loss")
    parallel = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["parallel"]
    return parallel["strategy"], parallel["processes"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp"])
def test_launch_starts_several_processes(recipe, tmp_path, strategy):
    to = f"train.output_dir={tmp_path / 'run'}"
    done = anyformer("train", str(recipe), *SHORT, to, "--launch", strategy, "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert spread(tmp_path / "run") == (strategy, 2)
    assert done.stdout.count("Held out, after training") == 1  # the first process speaks
    assert "2 processes" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp"])
def test_accelerate_launch_with_a_shipped_file(recipe, tmp_path, strategy):
    command = ["-m", "accelerate.commands.launch", "--config_file", str(launch_file(strategy)), "--num_processes", "2"]
    command += ["--main_process_port", str(free_port()), "-m", "anyformer", "train", str(recipe), *SHORT]
    command += [f"train.output_dir={tmp_path / 'run'}", *(["--launch", "tp"] if strategy == "tp" else [])]
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert spread(tmp_path / "run") == (strategy, 2)


@pytest.mark.slow
def test_torchrun_with_a_strategy_by_name(recipe, tmp_path):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command += ["-m", "anyformer", "train", str(recipe), *SHORT, f"train.output_dir={tmp_path / 'run'}"]
    done = run([*command, "--launch", "fsdp2"])
    assert done.returncode == 0, done.stderr
    assert spread(tmp_path / "run") == ("fsdp2", 2)


@pytest.mark.slow
def test_a_mistake_ends_with_status_2_and_one_message(recipe, tmp_path):
    """Found in the processes: the data are read there."""
    to = f"train.output_dir={tmp_path / 'run'}"
    done = anyformer("train", str(recipe), to, "data.source=nowhere.jsonl", "--launch", "ddp", "--processes", "2")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout
    assert 1 <= (done.stderr + done.stdout).count("nowhere.jsonl") <= 2


def test_a_mistake_in_the_recipe_is_found_before_anything_is_started(recipe):
    done = anyformer("train", str(recipe), "train.learning_rat=1", "--launch", "ddp", "--processes", "2")
    assert done.returncode == 2 and "did you mean" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--launch", "fsdp", "--processes", "2"], "no such strategy; did you mean fsdp2? There are"),
        (["--launch", "ddp", "--processes", "3"], "8 rows a step cannot be shared by 3 processes"),
        (["--launch", "fsdp2", "--processes", "1"], "needs at least two processes"),
        (["--launch", "ddp", "--processes", "100000"], "--processes 100000: this machine has"),
    ],
)
def test_what_cannot_be_started_is_said(recipe, arguments, said):
    done = anyformer("train", str(recipe), *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_deepspeed_without_its_package_is_refused(recipe):
    done = anyformer("train", str(recipe), "--launch", "deepspeed", "--processes", "2")
    assert done.returncode == 2 and "--launch deepspeed: DeepSpeed is not installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_accelerates_multi_cpu_starts_one_process_and_is_refused(recipe, tmp_path):
    config = tmp_path / "cpu.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nnum_machines: 1\n"
        "machine_rank: 0\nmixed_precision: 'no'\nuse_cpu: true\n",
        encoding="utf-8",
    )
    command = ["-m", "accelerate.commands.launch", "--config_file", str(config), "-m", "anyformer", "train"]
    done = run([*command, str(recipe), *SHORT, f"train.output_dir={tmp_path / 'run'}"])
    assert done.returncode != 0 and "started one alone" in done.stderr + done.stdout
    assert not (tmp_path / "run").exists()


@contextmanager
def training(recipe: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A launch in two processes that has made three steps and would go on for long."""
    command = [sys.executable, "-m", "anyformer", "train", str(recipe), f"train.output_dir={folder}"]
    started = subprocess.Popen(
        [*command, "train.max_steps=100000", "train.save_steps=1000000", "--launch", "ddp", "--processes", "2"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    assert started.stdout is not None
    try:
        for line in started.stdout:
            if "step 3" in line:
                break
        yield started
    finally:
        started.kill()


@pytest.mark.slow
def test_a_terminated_launch_ends_its_processes(recipe, tmp_path):
    """SIGTERM to the command reaches the processes, which write a checkpoint; the status says which signal it was."""
    with training(recipe, tmp_path / "run") as started:
        started.send_signal(signal.SIGTERM)
        rest = started.stdout.read()
        assert started.wait(timeout=120) == 143, rest
    assert list((tmp_path / "run").glob("checkpoint-*")), rest
    assert "Traceback" not in rest
    time.sleep(0.5)
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(p)]
    assert not [p for p in left if p.parent.name != str(os.getpid())]


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_is_named(recipe, tmp_path):
    with training(recipe, tmp_path / "run") as started:
        (second,) = (
            path.parent
            for path in Path("/proc").glob("[0-9]*/environ")
            if b"\0RANK=1\0" in _read(path) and str(tmp_path).encode() in _read(path.with_name("cmdline"))
        )
        os.kill(int(second.name), signal.SIGKILL)
        rest = started.stdout.read()
        assert started.wait(timeout=120) == 128 + signal.SIGKILL, rest
    assert "Process 1 was ended by SIGKILL" in rest and "--resume" in rest
    assert "Traceback" not in rest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
