"""The command line as a user meets it: every call in a process of its own, with its exit status."""

import importlib.metadata
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anyformer.scripts.cli import VERBS

GOOD = "model: {path: some/model}\ndata: {source: train.jsonl, max_rows: 5}\n"
COMMAND = [sys.executable, "-c", "from anyformer.scripts.cli import main; main()"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("good.yaml").write_text(GOOD)
    Path("bad.yaml").write_text(GOOD + "train:\n  sed: 1\n")
    Path("folder").mkdir()


def anyformer(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_help_names_every_verb():
    done = anyformer("--help")
    assert done.returncode == 0
    assert all(f"  {verb} " in done.stdout for verb in VERBS)
    assert "completion" not in done.stdout


def test_version():
    assert anyformer("--version").stdout == f"anyformer {importlib.metadata.version('anyformer')}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["train", "bad.yaml"], ["train", "good.yaml", "--print-config"]]
)
def test_light_and_under_a_second(arguments):
    """Processor seconds, not wall-clock ones: other work on the machine must not fail the test."""
    spy = (
        "import atexit, sys\n"
        "heavy = {'torch', 'transformers', 'trl', 'peft', 'datasets'}\n"
        "atexit.register(lambda: print('HEAVY', sorted(heavy & set(sys.modules))))\n"
        "from anyformer.scripts.cli import main; main()"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", spy, *arguments], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "HEAVY []" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


MISTAKES = [
    (["train"], "Missing argument 'RECIPE'"),
    (["trian", "good.yaml"], "no such command: 'trian'; did you mean 'train'?"),
    (["train", "nowhere.yaml"], "nowhere.yaml: no such recipe"),
    (["train", "god.yaml"], "did you mean good.yaml"),
    (["train", "folder"], "folder: is a folder"),
    (["train", "train.max_steps=3"], "the recipe comes first"),
    (["train", "bad.yaml"], "bad.yaml:4: train.sed: unknown key; did you mean 'seed'?"),
    (["train", "good.yaml", "seed"], "override 'seed': has no '='"),
    (["train", "good.yaml", "model.path.x=1"], "override 'model.path.x=1': model.path.x: model.path is text"),
    (["train", "good.yaml", "~train.seed"], "override '~train.seed': train: the recipe sets no such key"),
    (["train", "good.yaml", "--nonsense"], "No such option"),
    (["train", "good.yaml", "--resume", "--overwrite"], "give one of them"),
]


@pytest.mark.parametrize(("arguments", "part"), MISTAKES, ids=[" ".join(c[0]) for c in MISTAKES])
def test_a_mistake_gets_a_message_and_status_2(arguments, part):
    done = anyformer(*arguments)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_no_argument_shows_the_help():
    done = anyformer()
    assert done.returncode == 2
    assert "train" in done.stdout + done.stderr


def test_print_config_with_overrides_of_every_form():
    done = anyformer(
        "train",
        "good.yaml",
        "~data.max_rows",
        "train.max_steps=-1",
        "train.learning_rate=1e-4",
        "--print-config",
        "eval.samples=0",
    )
    assert done.returncode == 0, done.stderr
    for line in (
        "  max_steps: -1",
        "  learning_rate: 0.0001",
        "  samples: 0",
        "  max_rows: null",
        "  output_dir: runs/good",
    ):
        assert line in done.stdout.splitlines()
    Path("again.yaml").write_text(done.stdout)
    assert anyformer("train", "again.yaml", "--print-config").stdout == done.stdout


def test_recipes_lists_what_is_shipped():
    done = anyformer("list")
    assert done.returncode == 0
    assert re.search(r"smollm2-135m +SmolLM2-135M", done.stdout)


def test_a_user_error_in_any_verb_is_status_2():
    code = (
        "from anyformer.scripts import list_, cli\n"
        "from anyformer.recipes.errors import UserError\n"
        "def command(): raise UserError('a.txt:3: wrong')\n"
        "list_.command = command\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "list"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "a.txt:3: wrong\n")


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_interrupt_is_status_130():
    code = (
        "import time\nfrom anyformer.scripts import list_, cli\n"
        "def command(): print('ready', flush=True); time.sleep(30)\n"
        "list_.command = command\n"
        "cli.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        error = process.stderr.read()
        process.wait(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in error


SPEAKING = """
import logging, sys

class Speaks:
    def find_spec(self, name, path, target=None):
        if name == "bitsandbytes":
            print("imported now", file=sys.stderr)
            logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward")

sys.meta_path.insert(0, Speaks())
from anyformer.scripts.cli import main
main()
"""


@pytest.mark.parametrize("verb", ["generate", "chat", "merge", "train"])
def test_bitsandbytes_says_nothing_where_nothing_is_quantised(verb, tiny_checkpoint, tmp_path):
    """What it says at its import depends on the processor, so it is said here on every one."""
    pytest.importorskip("bitsandbytes")
    recipe = tmp_path / "recipe.yaml"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 8, encoding="utf-8")
    recipe.write_text(
        f"model: {{path: {tiny_checkpoint}}}\nadapter: {{kind: lora}}\ndata: {{source: {rows}, eval_fraction: 0}}\n"
        f"train: {{output_dir: {tmp_path / 'run'}, max_length: 64}}\nlogging: {{level: debug}}\n",
        encoding="utf-8",
    )
    words = {
        "generate": (tiny_checkpoint, "one", "--max-new-tokens", "1"),
        "chat": (tiny_checkpoint,),
        "merge": (tmp_path / "nothing", tmp_path / "merged"),
        "train": (recipe, "--dry-run"),
    }[verb]
    command = [sys.executable, "-P", "-c", SPEAKING, verb, *map(str, words)]
    done = subprocess.run(command, input="/exit\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == (2 if verb == "merge" else 0), done.stderr
    assert "imported now" in done.stderr and "gemm_4bit_forward" not in done.stderr + done.stdout
