"""A process that tokenises parts of the rows for another one: `python -m anyformer.recipes.tokens.worker`.

It reads pickles from its standard input and answers each on its standard output: first what it has to do, then parts
of the rows. Tokens do not pass through the pipe: each part is an Arrow file. It ends with its input.
"""

import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    # What a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions = sys.stdin.buffer
    try:
        job = pickle.loads(pickle.load(questions))
        _answer(answers, "ready")
    except EOFError:
        return
    except Exception as error:  # a tokenizer whose class is not to be found here, above all
        _answer(answers, error)
        return
    while True:
        try:
            number, rows = pickle.load(questions)
        except EOFError:
            return
        try:
            answer = part_of(job, number, rows)
        except Exception as error:
            error.add_note(f"In a process that tokenises:\n{traceback.format_exc()}")
            answer = error
        _answer(answers, answer)


def part_of(job: "tuple[Any, Any, Path]", number: int, rows: list[dict[str, Any]]) -> Any:
    """Tokenise a part of the rows into a file and give the report on it.

    Args:
        job: a `Tokenizing` of a row-wise function, the tokenizer, and the folder of the files.
        number: of the part.
    """
    (function, settings), tokenizer, folder = job
    data = function.part(rows, tokenizer, **settings)
    if len(data.dataset):
        write_table(data.dataset.data.table, part_file(folder, number))
    return data.report


def part_file(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06}.arrow"


def write_table(table: Any, file: Path) -> None:
    import pyarrow as pa

    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def _answer(answers: Any, value: Any) -> None:
    try:
        message = pickle.dumps(value)
    except Exception:  # an exception that holds what cannot be sent
        message = pickle.dumps(RuntimeError(f"{type(value).__name__}: {value}"))
    answers.write(message)
    answers.flush()


if __name__ == "__main__":
    main()
