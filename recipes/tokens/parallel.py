"""Tokenising rows in parts, on all cores, into one Arrow file.

Rows are taken in parts of a fixed size, so that the outcome is the same whatever the number of processes, and memory
holds a few parts at a time. The processes are started anew, not forked: a process that holds threads of torch cannot
be forked safely, and a script without `if __name__ == "__main__"` must not be run again.
"""

import os
import pickle
import queue
import re
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from .report import TokenizationReport, Tokenizing
from .worker import part_file, part_of, write_table

Row = dict[str, Any]

# A part: rows, a multiple of what a tokenizer is given at a time, or about so many characters of text.
PART_ROWS, PART_SIZE = 2048, 4_000_000
# Parts that one process has done before others have started; docs/results.md has the measurement.
WORTH = 3

TOKENS = "tokens.arrow"


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Part(NamedTuple):
    """Rows, the first of which is row `first` of all, counted from 1."""

    number: int
    first: int
    rows: list[Row]


def parts_of(rows: Iterable[Row]) -> Iterator[Part]:
    """The rows in parts."""
    number, first, held, size = 0, 1, [], 0
    for row in rows:
        held.append(row)
        size += _size(row)
        if len(held) == PART_ROWS or size >= PART_SIZE:
            yield Part(number, first, held)
            number, first, held, size = number + 1, first + len(held), [], 0
    if held:
        yield Part(number, first, held)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 8


def tokenize_into(
    folder: Path, tokenizing: Tokenizing, rows: Iterable[Row], tokenizer: Any, num_proc: int | None = None
) -> tuple[TokenizationReport, int]:
    """Tokenise into the file `TOKENS` of a folder.

    A function that is not row-wise runs in this process, with the tokenizer's own threads.

    Args:
        rows: may be a stream; it is iterated once, and again only to tell what is wrong with it.
        num_proc: processes at most, all usable cores by default; few rows are done by this one.

    Returns:
        The report, and the number of processes.

    Raises:
        UserError: rows that cannot be used, or none left; or a process has died.
        OSError: the folder cannot be written.
    """
    function, settings = tokenizing
    if not hasattr(function, "part"):
        data = tokenizing.run(rows, tokenizer)
        write_table(data.dataset.data.table, folder / TOKENS)
        return data.report, 1
    iterator = parts_of(rows)
    head = list(islice(iterator, WORTH + 1))
    wanted = usable_cores() if num_proc is None else num_proc
    workers = _Workers.started(wanted, (tokenizing, tokenizer, folder)) if wanted > 1 and len(head) > WORTH else None
    parts = chain(head, iterator)
    head = []  # the first parts need not be held to the end
    ours = _here((tokenizing, tokenizer, folder), parts)
    reports = ours if workers is None else workers.reports(parts)
    total, count = TokenizationReport(), 0
    try:
        for report in reports:
            total.add(report)
            count += 1
    except OfPart:
        tokenizing.run(rows, tokenizer)  # all rows in one go give a message on all of them
        raise
    finally:
        reports.close()
        if workers:
            workers.end()  # a generator that was never begun has not ended them
    function.finish(total, **settings)
    _join(folder, count, function.absent)
    return total, workers.count if workers else 1


def _join(folder: Path, count: int, absent: dict[str, Any]) -> None:
    """Make one file of the parts; those without a row have none."""
    import pyarrow as pa

    files = [file for number in range(count) if (file := part_file(folder, number)).exists()]
    schema = max(map(_schema, files), key=lambda found: len(found.names))
    with pa.OSFile(str(folder / TOKENS), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for file in files:
            with pa.memory_map(str(file)) as source:
                table = pa.ipc.open_stream(source).read_all()
                for name in schema.names:
                    if name not in table.column_names:
                        kind = schema.field(name).type
                        table = table.append_column(name, pa.array([absent[name]] * len(table), kind))
                writer.write_table(table.select(schema.names).cast(schema))
                del table
            file.unlink()


def _schema(file: Path) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        return pa.ipc.open_stream(source).schema


# Errors


class OfRow(UserError):
    """A row that cannot be used; its number is that among all rows."""


class OfPart(UserError):
    """A fault of a part that no single row explains; a count in its message is that of the part."""


_ROW = re.compile(r"Row (\d+)\b")


def _of_all(error: UserError, first: int) -> UserError:
    """The error with the number of the row among all, where it is one on a row of the part that begins at `first`."""
    match = _ROW.match(str(error))
    if not match:
        return OfPart(str(error))
    return OfRow(f"Row {first - 1 + int(match.group(1))}{str(error)[match.end() :]}")


# This process, or others


def _here(job: tuple[Tokenizing, Any, Path], parts: Iterable[Part]) -> Generator[TokenizationReport, None, None]:
    for number, first, rows in parts:
        try:
            yield part_of(job, number, rows)
        except UserError as error:
            raise _of_all(error, first) from error


class _Workers:
    """Processes that run `worker`."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self.processes, self.count = processes, len(processes)
        self.idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in processes:
            self.idle.put(process)

    @classmethod
    def started(cls, count: int, job: tuple[Tokenizing, Any, Path]) -> "_Workers | None":
        """So many processes, or none where this tokenizer or function cannot be had in another process."""
        try:
            message = pickle.dumps(job)
        except Exception:
            return None
        paths = [path or str(Path.cwd()) for path in sys.path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRANSFORMERS_VERBOSITY": "error"}
        # One thread each, for the processes are as many as there are cores.
        environment |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", f"{__package__}.worker"]
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
        # In a session of its own a process does not see Ctrl-C, with which the one that started it ends it.
        workers = cls([])
        try:
            for _ in range(count):
                workers.processes.append(subprocess.Popen(command, start_new_session=True, **options))
            with ThreadPoolExecutor(count) as pool:
                ready = list(pool.map(lambda process: _ask(process, message) == "ready", workers.processes))
        except (OSError, EOFError, pickle.UnpicklingError):
            workers.end()
            return None
        except BaseException:
            workers.end()
            raise
        if not all(ready):
            workers.end()
            return None
        return cls(workers.processes)

    def reports(self, parts: Iterable[Part]) -> Generator[TokenizationReport, None, None]:
        """The reports on the parts, in their order; what is wrong with the first bad one is raised."""
        waiting: deque[Future[TokenizationReport]] = deque()
        pool = ThreadPoolExecutor(self.count)
        try:
            for part in parts:
                waiting.append(pool.submit(self._report, part))
                if len(waiting) > self.count:  # one more than are worked on
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            self.end()
            pool.shutdown(cancel_futures=True)

    def _report(self, part: Part) -> TokenizationReport:
        process = self.idle.get()
        try:
            answer = _ask(process, (part.number, part.rows))
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            status = process.wait()
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            raise UserError(
                f"data.num_proc: a process that tokenises rows {part.first} to {part.first + len(part.rows) - 1} "
                f"{how}; signal 9 mostly means that memory ran out: set data.num_proc to fewer than {self.count}"
            ) from error
        finally:
            self.idle.put(process)  # a dead one too, so that nobody waits for it for ever
        if isinstance(answer, UserError):
            raise _of_all(answer, part.first)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what was not yet sent has nowhere to go
                    pipe.close()  # type: ignore[union-attr]


def _ask(process: "subprocess.Popen[bytes]", question: Any) -> Any:
    assert process.stdin is not None and process.stdout is not None
    pickle.dump(question, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
    process.stdin.flush()
    return pickle.load(process.stdout)
