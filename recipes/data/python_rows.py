"""Rows from a function in a file of the user's: the way out where no setting reads the data."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..user_code import function_problem, in_file, line_in, load_function
from .faults import BadRow, clip, type_name
from .sources import Source


def function_rows(source: Source) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """What the function returns or yields, counted from 1.

    Raises:
        UserError: no such function, or whatever it raises, with the line of its file.
    """
    file, name = _place(source)
    function = load_function(file, name, source.setting)
    try:
        rows = function(**source.arguments)
        if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | dict):
            raise UserError(
                f"{source.setting}: {source.where} gives {type_name(rows)}: it must return or yield rows, each a dict"
            )
        number = 0
        for number, row in enumerate(rows, 1):
            yield number, _checked(row)
    except UserError:
        raise
    except GeneratorExit:
        raise
    except (Exception, SystemExit) as error:  # somebody else's function: whatever it raises is told with its name
        raise UserError(
            f"{source.setting}: {source.where} raises {type(error).__name__}: {error}{line_in(file, error)}"
        ) from error
    if not number:
        yield 0, BadRow("gives no rows")


def file_digest(source: Source) -> str:
    """Of the file's content: other code is other data, even where it gives the same rows.

    Raises:
        UserError: no such file or function.
    """
    return hashlib.sha256(_place(source)[0].read_bytes()).hexdigest()


def _place(source: Source) -> tuple[Path, str]:
    file, name = in_file(source.where) or (source.where, "")
    if problem := function_problem(file, name):
        raise UserError(f"{source.setting}: {problem}")
    return Path(file).expanduser(), name


def _checked(row: Any) -> dict[str, Any] | BadRow:
    """A row, lists for tuples, or why it could not stand in a file: then it would not be the same in the next run."""
    if not isinstance(row, dict):
        return BadRow(f"expected a dict with named fields, found {type_name(row)}")
    try:
        return {_key(name): _plain(value, str(name)) for name, value in row.items()}
    except _NotPlainError as error:
        return BadRow(str(error))


class _NotPlainError(Exception):
    """A value that JSON could not hold."""


def _key(name: Any) -> str:
    if not isinstance(name, str):
        raise _NotPlainError(f"a key must be text, found {type_name(name)}")
    return name


def _plain(value: Any, name: str) -> Any:
    if value is None or type(value) in (str, int, bool):
        return value
    if type(value) is float:
        if value - value != 0:  # infinite, or no number
            raise _NotPlainError(f"{clip([name])} is no finite number")
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if isinstance(value, dict):
        return {_key(key): _plain(item, name) for key, item in value.items()}
    kind = type(value).__name__
    raise _NotPlainError(f"{clip([name])} holds a value of type {kind}: give text, numbers, lists and dicts")
