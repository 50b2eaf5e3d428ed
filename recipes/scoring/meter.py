"""How far an evaluation is, and how fast it went."""

import time
from collections.abc import Callable
from types import TracebackType


def counted(count: int, unit: str) -> str:
    """So many of a thing, which is named in the singular."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


class Meter:
    """A bar on standard error where that is a terminal, and one line at the end.

    Args:
        what: is measured, of how many of `unit`, in the singular.
    """

    def __init__(self, what: str, total: int, unit: str, tell: Callable[[str], None]) -> None:
        self.what, self.total, self.unit, self.tell = what, total, unit, tell
        self.tokens = 0

    def __enter__(self) -> "Meter":
        from tqdm import tqdm

        self.bar = tqdm(total=self.total, desc=self.what, unit=f" {self.unit}s", disable=None, leave=False)
        self.start = time.perf_counter()
        return self

    def add(self, count: int, tokens: int) -> None:
        """So many more are done, of so many tokens in all."""
        self.tokens += tokens
        self.bar.update(count)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        if error is None:
            seconds = max(time.perf_counter() - self.start, 1e-9)
            rate = f"{self.tokens / seconds:,.0f} tokens/s"
            done = f"{counted(self.total, self.unit)}, {counted(self.tokens, 'token')}"
            self.tell(f"{self.what}: {done} in {seconds:.1f} s ({rate})")
