"""A subprocess with limits for programs that a model wrote.

What a program gets: an interpreter of its own without this process's environment or descriptors, an empty folder that
is removed, and limits of time, memory, processes, output and disk. Where the kernel lets users have namespaces (Linux,
unless switched off), it also has no network, sees and reaches no process but its own, which all end with it, and finds
every file outside its folder read-only; root's programs run as nobody. What of this could not be had is in
`Outcome.missing`.

What it is not: a defence against a determined attacker. A program can read what the user's other programs can read,
it shares the kernel, and it runs in one interpreter with its tests, so that code written to deceive them can (by an
object that equals everything, say). It guards against accidents, and against the short cuts that models find: ending
early, printing what a pass would print, catching what ends it. For code from strangers use a virtual machine.
"""

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ..errors import UserError

_CHILD = Path(__file__).with_name("sandbox_child.py")
_REPORT_BYTES = 2**14  # of the report, whatever a program may write there
_GLANCE = 0.01  # seconds between two looks whether it has ended

Result = Literal["passed", "failed", "ended early", "timed out", "killed"]


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        cpu_seconds: computing time of each process.
        wall_seconds: of the whole run; larger, as the machine may be busy.
        memory: bytes of address space of each process.
        processes: and threads, at the same time.
        disk: bytes of its folder, and of each file.
        output: bytes that are kept, the last; the rest is read and dropped.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 15.0
    memory: int = 2**30
    processes: int = 8
    disk: int = 2**26
    output: int = 2**12


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        result: "passed" only if every step ran to its end.
        output: the end of what it wrote, a traceback included.
        missing: what of the isolation this machine did not give, in words.
    """

    result: Result
    output: str
    missing: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.result == "passed"


def require_permission(allow_code: bool) -> None:
    """Raises:
    UserError: nobody has agreed that code of a model is run.
    """
    if allow_code is not True:
        raise UserError(
            "pass@k runs programs that the model wrote, in a subprocess with limits that is no defence against a "
            "determined attacker: allow it with --allow-code"
        )


def run_program(steps: Sequence[str], *, allow_code: bool, limits: Limits | None = None) -> Outcome:
    """Run Python source texts one after the other in one module, in a sandbox.

    Args:
        steps: a program, then its tests; each is compiled by itself.
        allow_code: somebody has agreed to it.

    Raises:
        UserError: not allowed, or a system without fork.
    """
    require_permission(allow_code)
    if not hasattr(os, "fork"):
        raise UserError("programs of a model are run on Linux and macOS alone: this system cannot confine them")
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder, _Pipes() as pipes:
        task = {"steps": list(steps), "folder": folder, "limits": asdict(limits), **pipes.for_child}
        process = _start(folder, list(pipes.for_child.values()))
        try:
            pipes.close_childs_ends()
            ended, output, report = _listen(process, json.dumps(task).encode(), pipes, limits)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    first, _, rest = report.partition(b"\n")
    missing = tuple(json.loads(first)) if rest or report.endswith(b"\n") else ()
    text = output.decode("utf-8", "replace")
    return Outcome(_result(ended, rest == pipes.token, process.returncode), text, missing)


def _result(ended: bool, token: bool, status: int) -> Result:
    if not ended or status == 128 + signal.SIGXCPU:
        return "timed out"
    if token and status == 0:
        return "passed"
    if status > 128 or status < 0:
        return "killed"
    return "failed" if status else "ended early"


class _Pipes:
    """A token that the child finds behind its tests, and the report in which it has to stand."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16).encode()
        self._token_out, token_in = os.pipe()
        self.report, self._report_in = os.pipe()
        os.write(token_in, self.token)
        os.close(token_in)
        self.for_child = {"token": self._token_out, "report": self._report_in}
        self._open = [self._token_out, self._report_in, self.report]

    def close_childs_ends(self) -> None:
        for descriptor in self._open[:2]:
            os.close(descriptor)
        self._open = self._open[2:]

    def __enter__(self) -> "_Pipes":
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._open:
            os.close(descriptor)


def _start(folder: str, descriptors: list[int]) -> "subprocess.Popen[bytes]":
    # Nothing is inherited; the seed of hashes is fixed, so that a program does the same each time.
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        [sys.executable, "-s", "-P", "-B", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=environment | {"OMP_NUM_THREADS": "1"},
        pass_fds=descriptors,
        start_new_session=True,
    )


def _listen(
    process: "subprocess.Popen[bytes]", task: bytes, pipes: _Pipes, limits: Limits
) -> tuple[bool, bytes, bytes]:
    """Returns: whether it ended in time, the end of its output, and its report."""
    assert process.stdin and process.stdout
    until = time.monotonic() + limits.wall_seconds
    output, report, ended = bytearray(), bytearray(), False
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(task)  # read whole before anything is run
    with selectors.DefaultSelector() as selector, process.stdout:
        for stream in (process.stdout.fileno(), pipes.report):
            os.set_blocking(stream, False)
            selector.register(stream, selectors.EVENT_READ)
        while time.monotonic() < until:
            # Once more after the end: what it wrote last is still in the pipes. Whoever outlived it may hold them open.
            last = process.poll() is not None
            for key, _ in selector.select(0 if last else _GLANCE):
                _read(selector, key.fd, report if key.fd == pipes.report else output)
            del output[: -limits.output], report[_REPORT_BYTES:]
            if last:
                ended = True
                break
            if not selector.get_map():
                time.sleep(_GLANCE)
    return ended, bytes(output), bytes(report)


def _read(selector: selectors.BaseSelector, descriptor: int, into: bytearray) -> None:
    with contextlib.suppress(BlockingIOError):
        if chunk := os.read(descriptor, 2**16):
            into += chunk
        else:
            selector.unregister(descriptor)
