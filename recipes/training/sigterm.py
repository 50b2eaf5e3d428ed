"""SIGTERM as a request: the first is noted, a later one ends the process at once."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# Launchers pass the signal on that the scheduler has sent to every process already: one request arrives twice.
_SAME_REQUEST_SECONDS = 2.0
STATUS = 128 + signal.SIGTERM


class Sigterm:
    """Context in which a SIGTERM does not end the process but sets `received`.

    Python runs a handler only between two of its own instructions, which may be long in coming: a backward pass, or a
    collective that waits for a process that is gone. So the signals are counted by a thread, which reads what the
    interpreter writes into a pipe the moment that one arrives, and ends the process at the second.

    Elsewhere than in the main thread, where Python takes no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.received = False
        self._first = 0.0
        self._restore: tuple[Any, int] | None = None

    def __enter__(self) -> "Sigterm":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._restore = signal.signal(signal.SIGTERM, self._note), before
        self._thread = threading.Thread(target=self._count, name="sigterm", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._restore is None:
            return
        handler, before = self._restore
        signal.signal(signal.SIGTERM, handler)
        signal.set_wakeup_fd(before)
        os.close(self._write)  # ends the thread
        self._thread.join()
        os.close(self._read)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def _count(self) -> None:
        while data := os.read(self._read, 64):
            for number in data:
                if number != signal.SIGTERM:
                    continue
                now = time.monotonic()
                self.received, self._first = True, self._first or now
                if now - self._first > _SAME_REQUEST_SECONDS:
                    os._exit(STATUS)
