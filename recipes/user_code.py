"""Functions in Python files of the user's, as a recipe names them: FILE.py:FUNCTION.

Whether a file can be used is told without running it; it runs where the function is loaded.
"""

import ast
import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .errors import UserError


def in_file(name: str) -> tuple[str, str] | None:
    """File and function of `FILE.py:FUNCTION`, or None."""
    file, colon, function = name.rpartition(":")
    return (file, function) if colon and file.endswith(".py") else None


def functions_of(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that a file defines, without running it."""
    tree = ast.parse(Path(file).expanduser().read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def function_problem(file: str, function: str) -> str | None:
    """Why a function cannot be used, as far as can be told without running its file; or None."""
    try:
        functions = functions_of(file)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:  # no text, or no code
        return f"{file} is no Python: {error}"
    known = ", ".join(functions) or "none"
    if not function:
        return f"{file} names no function: write {file}:FUNCTION; it has {known}"
    if function not in functions:
        return f"{file} defines no function {function!r}; it has {known}{near(function, functions)}"
    if isinstance(functions[function], ast.AsyncFunctionDef):
        return f"{file}:{function} is async; write a plain function"
    return None


def near(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def load_function(file: Path, name: str, setting: str) -> Callable[..., Any]:
    """Run a file and take a function from it.

    Args:
        setting: what the recipe calls it, for messages.

    Raises:
        UserError: whatever the file raises, with the line.
    """
    # Dataclasses and pickles look their module up by name; two files of one name are two modules.
    unique = hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    module_name = f"anyformer_user_{file.stem}_{unique}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # somebody else's code: whatever it raises is told with its name
        del sys.modules[module_name]
        raise UserError(f"{setting}: {file} raises {type(error).__name__}: {error}{line_in(file, error)}") from error
    function = getattr(module, name)
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{setting}: {file}:{name} is async; write a plain function")
    return function


def line_in(file: Path, error: BaseException) -> str:
    """` (line 12)`, where an error came out of a file; what is deepest in the file counts."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file.resolve()]
    return f" (line {lines[-1]})" if lines else ""
