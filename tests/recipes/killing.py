"""Commands in processes that are forked from one that has imported everything, and moments to kill them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

ZYGOTE = Path(__file__).with_name("zygote.py")
# Between two looks at what a run does.
_TICK = 0.0005


class Zygote:
    """Context: starts commands at once, see `zygote.py`."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __enter__(self) -> "Zygote":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, str(ZYGOTE)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._line() == "ready\n"
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def start(self, arguments: Sequence[str], **more: object) -> list[int]:
        """Process ids."""
        assert self.process.stdin is not None
        self.log.write_text("")
        order = {"arguments": list(arguments), "log": str(self.log), **more}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def statuses(self) -> list[int]:
        """Exit statuses of what was started last, once it has ended; negative for a signal."""
        return json.loads(self._line())

    def run(self, arguments: Sequence[str], **more: object) -> list[int]:
        self.start(arguments, **more)
        return self.statuses()

    def killed(self, moment: Callable[[], bool], arguments: Sequence[str], **more: object) -> bool:
        """Kill all processes of a command at a moment; False if they had ended, well, before it."""
        running = self.start(arguments, **more)
        try:
            while not moment() and all(map(_runs, running)):
                time.sleep(_TICK)
        finally:  # whatever a moment raises: the next command must not read these statuses as its own
            for process in running:
                if _runs(process):
                    os.kill(process, signal.SIGKILL)
            statuses = self.statuses()
        # A process whose peer was killed may end by itself before its own kill.
        assert set(statuses) == {0} or -signal.SIGKILL in statuses, self.log.read_text()[-4000:]
        return statuses != [0] * len(statuses)


def _runs(process: int) -> bool:
    """Neither gone nor a zombie: only the zygote, which waits for it, frees its number."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def while_there(path: Path, later: float) -> Callable[[], bool]:
    """So many seconds after a path has appeared; its name may be a pattern."""
    seen: list[float] = []

    def moment() -> bool:
        with suppress(FileNotFoundError):  # the folder goes while it is looked through
            if not seen and any(path.parent.glob(path.name)):
                seen.append(time.monotonic())
        return bool(seen) and time.monotonic() - seen[0] >= later

    return moment


def moments(count: int, whole: float, saving: Path, seed: int) -> list[Callable[[], Callable[[], bool]]]:
    """Makers of random moments: half of them somewhere in a run's duration, half while a checkpoint is written."""
    chance = random.Random(seed)
    return [
        partial(while_there, saving, chance.uniform(0, 0.05))
        if number % 2
        else partial(after, chance.uniform(0, whole))
        for number in range(count)
    ]
