"""Programs that try to get out of the sandbox, or to pass without passing."""

import os
import time
from pathlib import Path

import pytest

from anyformer.recipes.errors import UserError
from anyformer.recipes.scoring.sandbox import Limits, Outcome, run_program

SHORT = Limits(cpu_seconds=1, wall_seconds=3.0)


def run(program: str, tests: str = "assert answer == 42", limits: Limits = SHORT) -> Outcome:
    return run_program([program, tests], allow_code=True, limits=limits)


MARK = f"boxed-{os.getpid()}"
# By this name its processes are found, also from outside.
NAMED = f"import ctypes\nctypes.CDLL(None).prctl(15, b'{MARK}')\n"


def outlived() -> bool:
    """Whether processes of a program are still there, some time after its end."""
    until = time.monotonic() + 10
    while found := any(_name(entry) == MARK for entry in Path("/proc").glob("[0-9]*")):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return found


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture
def isolated() -> None:
    if missing := run("answer = 42").missing:
        pytest.skip(f"this machine does not give: {', '.join(missing)}")


def test_what_is_right_passes_and_what_is_wrong_does_not() -> None:
    assert run("answer = 42").result == "passed"
    wrong = run("answer = 41")
    assert wrong.result == "failed"
    assert wrong.output.rstrip().endswith("AssertionError")


def test_nothing_is_run_without_permission(tmp_path: Path) -> None:
    for given in (False, 1, "yes"):
        with pytest.raises(UserError, match="--allow-code"):
            run_program([f"open({str(tmp_path / 'x')!r}, 'w')"], allow_code=given)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "program",
    [
        "exit(0)",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.execv('/bin/true', ['true'])",
        "print('passed'); print('{}'); import os; os._exit(0)",
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'passed\\n')\n    except OSError: pass\nos._exit(0)",
        "import os; os.closerange(0, 64)\nanswer = 42",
        "answer = 41\nimport sys\nsys.excepthook = lambda *error: None",
        "answer = 41\nimport os\nos.write = os.read = lambda *given: b''",
        "answer = 41\nimport os\nif os.fork(): os._exit(0)",
        "answer = 41\nimport atexit, os\natexit.register(os._exit, 0)",
        'answer = 41\nx = """',
        "answer = 41\nif False:",
        "answer = 41 \\",
        "x = 1",
    ],
)
def test_short_cuts_do_not_pass(program: str) -> None:
    outcome = run(program)
    assert not outcome.passed
    assert outcome.result != "timed out"


def test_a_test_that_exits_does_not_pass() -> None:
    assert not run("import sys\nclass Answer:\n    def __eq__(self, other): sys.exit(0)\nanswer = Answer()").passed


def test_time_is_limited() -> None:
    assert run("while True: pass").result == "timed out"
    begun = time.monotonic()
    waiting = run("import time\ntime.sleep(1000)", limits=Limits(wall_seconds=0.5))
    assert waiting.result == "timed out"
    assert time.monotonic() - begun < 100
    stubborn = "import signal\nfor n in (24, 15, 2): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    assert run(stubborn).result in ("timed out", "killed")


def test_memory_is_limited() -> None:
    outcome = run("x = bytearray(10 * 2**30)")
    assert outcome.result == "failed"
    assert "MemoryError" in outcome.output
    assert run("x = bytearray(2**26)\nanswer = 42").passed


def test_processes_are_limited() -> None:
    bomb = "import os\nwhile True:\n    os.fork()"
    assert "Resource temporarily unavailable" in run(bomb).output
    patient = NAMED + "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(patient, limits=Limits(cpu_seconds=1, wall_seconds=1.0)).result == "timed out"
    assert not outlived()
    assert run("import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()\nanswer = 42").passed


def test_output_is_cut_and_does_not_block() -> None:
    outcome = run("import sys\nfor _ in range(2000): sys.stdout.write('x' * 10_000)\nprint('end')\nanswer = 42")
    assert outcome.passed
    assert len(outcome.output) <= SHORT.output
    assert outcome.output.endswith("xend\n")


def test_disk_is_limited() -> None:
    assert "File too large" in run("with open('f', 'wb') as f:\n    f.write(bytes(2**27))").output
    assert run("open('f', 'w').write('x')\nanswer = 42").passed


def test_nothing_is_inherited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "hidden")
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "no"))
    reader = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(reader, True)
    program = f"""
import os
answer = 42
assert 'SECRET_OF_THE_PARENT' not in os.environ and 'PYTHONSTARTUP' not in os.environ
assert not os.listdir('.')
try:
    same = os.fstat({reader}).st_ino == {os.fstat(reader).st_ino}
except OSError:
    same = False
assert not same
"""
    outcome = run(program)
    os.close(reader)
    assert outcome.passed, outcome.output


@pytest.mark.usefixtures("isolated")
def test_the_parents_environment_cannot_be_read() -> None:
    outcome = run(f"open('/proc/{os.getpid()}/environ', 'rb').read()\nanswer = 42")
    assert outcome.result == "failed"


@pytest.mark.usefixtures("isolated")
def test_files_outside_stay_as_they_are(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    mine = tmp_path / "mine"
    mine.write_text("kept")
    mine.chmod(0o666)
    for program in (
        f"open({str(mine)!r}, 'w')",
        f"import os; os.remove({str(mine)!r})",
        f"open('{tmp_path}/new', 'w')",
    ):
        assert run(program).result == "failed"
    assert [file.read_text() for file in tmp_path.iterdir()] == ["kept"]


@pytest.mark.usefixtures("isolated")
def test_other_processes_cannot_be_reached() -> None:
    assert run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nanswer = 42").passed  # it has no effect
    assert run(f"import os\nos.kill({os.getpid()}, 0)").result == "failed"


@pytest.mark.usefixtures("isolated")
def test_there_is_no_network() -> None:
    program = "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=2)"
    assert "Network is unreachable" in run(program).output


@pytest.mark.usefixtures("isolated")
def test_nobody_outlives_the_run() -> None:
    daemon = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)\n"
    assert run(NAMED + daemon + "answer = 42").passed
    assert not outlived()


def test_deep_recursion_ends_the_program_alone() -> None:
    assert "RecursionError" in run("def f(): f()\nf()").output
    assert not run("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()").passed


def test_hashes_are_the_same_each_time() -> None:
    texts = {run("print(hash('a word'))\nanswer = 42").output for _ in range(2)}
    assert len(texts) == 1


def test_classes_find_their_module() -> None:
    program = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int"
    assert run(program, "assert A(1) == A(1)\nif __name__ == '__main__': exit(1)").passed
