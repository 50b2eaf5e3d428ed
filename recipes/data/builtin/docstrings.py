"""A real data set that every Python machine has: the standard library's signatures and docstrings.

Each row asks for a one-line docstring of a function, shown by its signature, and answers with the first
paragraph of the docstring that its authors wrote. Standard library only, so that it imports in no time.
"""

import ast
import copy
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UserError
from ..files import Skipped
from .base import Loaded, in_held_out_part

INSTRUCTION = "Write a one-line docstring for this Python function."
MIN_WORDS, MAX_WORDS = 3, 60

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class DocstringData:
    """What was found.

    Attributes:
        rows: `{"prompt": [user message], "completion": [assistant message], "module": "json.decoder"}`,
            ordered by module name, then as they stand in the source.
        sources: number of source files parsed.
        unreadable: (file, reason) of the source files that could not be parsed.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    sources: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)


def load_docstrings(root: str | Path | None = None, *, include_private: bool = False) -> DocstringData:
    """Read every function and method with a docstring under `root`.

    Args:
        root: a folder of Python packages; the running interpreter's standard library by default.
        include_private: keep names such as `_helper` as well. Names such as `__init__` are always kept.

    Raises:
        UserError: the folder has no Python sources (zipped or byte-code-only installations).
    """
    folder = Path(root) if root is not None else Path(sysconfig.get_path("stdlib"))
    data = DocstringData()
    seen: set[Any] = set()
    for module, path in sorted(library_modules(folder)):
        try:
            tree = _parse(path)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
            data.unreadable.append((str(path), type(error).__name__))
            continue
        data.sources += 1
        for definition, summary in _functions(tree, include_private):
            # One text stands in several modules where a module was forked from another: once is enough,
            # and would otherwise stand on both sides of the split.
            if (definition, summary) in seen or (module, definition) in seen:
                continue
            seen |= {(definition, summary), (module, definition)}
            data.rows.append(_row(module, definition, summary))
    if not data.rows:
        raise UserError(
            f"the standard library at {folder} holds no readable Python sources "
            f"({data.sources} files read, {len(data.unreadable)} unreadable). Use a Python installation that "
            "ships its .py files, or name a file of your own in data.source."
        )
    return data


def load() -> Loaded:
    """The rows as a built-in data set; groups are those of `library_unit`."""
    data = load_docstrings()
    skipped = [Skipped(file, 0, reason) for file, reason in data.unreadable]
    return Loaded(data.rows, [library_unit(row["module"]) for row in data.rows], skipped)


def is_held_out(module: str, *, eval_fraction: float, seed: int) -> bool:
    """Whether a module belongs to the held-out part: the whole of its `library_unit` does or does not."""
    return in_held_out_part(library_unit(module), eval_fraction=eval_fraction, seed=seed)


def library_unit(module: str) -> str:
    """What of the library stays on one side of a split: the top-level package, taken together with its Python twin
    (`_pyio` and `io`, whose texts are near-copies)."""
    return module.split(".")[0].removeprefix("_py").lstrip("_")


def library_modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """(module, file) of the Python sources under a folder, without tests and installed packages, in no order."""
    for here, subfolders, files in os.walk(folder):
        # Folders such as config-3.11-x86_64 are no packages.
        subfolders[:] = [name for name in subfolders if name.isidentifier() and name not in _SKIPPED_FOLDERS]
        package = Path(here).relative_to(folder).parts
        for path in (Path(here, name) for name in files):
            if path.suffix == ".py" and path.stem.isidentifier():
                yield ".".join(package if path.stem == "__init__" else (*package, path.stem)), path


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in others' sources are not this user's concern
        return ast.parse(path.read_bytes())  # bytes: the parser obeys the coding line


def _functions(tree: ast.Module, include_private: bool) -> Iterator[tuple[str, str]]:
    for node, classes in _walk(tree.body, ()):
        private = node.name.startswith("_") and not (node.name.startswith("__") and node.name.endswith("__"))
        if private and not include_private:
            continue
        summary = _summary(ast.get_docstring(node) or "")
        if summary:
            yield _definition(node, classes), summary


def _walk(body: list[Any], classes: tuple[ast.ClassDef, ...]) -> Iterator[tuple[_Function, tuple]]:
    """Functions at module and class level, those under `if` and `try` too, in the order of the source."""
    for node in body:
        if isinstance(node, _Function):
            yield node, classes
        elif isinstance(node, ast.ClassDef):
            yield from _walk(node.body, (*classes, node))
        else:
            for name in ("body", "handlers", "orelse", "finalbody"):
                yield from _walk(getattr(node, name, None) or [], classes)


def _definition(function: _Function, classes: tuple[ast.ClassDef, ...]) -> str:
    """The signature as valid Python: decorators and annotations as they stand, inside its classes."""
    node: Any = copy.copy(function)
    node.body = [ast.Expr(ast.Constant(...))]
    for outer in reversed(classes):
        wrapped = copy.copy(outer)
        wrapped.body, wrapped.decorator_list = [node], []
        node = wrapped
    return ast.unparse(node).strip()


def _summary(docstring: str) -> str:
    """The first paragraph on one line, or "" where it is no sentence."""
    text = " ".join(docstring.strip().split("\n\n")[0].split())
    usable = MIN_WORDS <= len(text.split()) <= MAX_WORDS and not text.startswith(">>>")
    # A lone surrogate can be written as an escape; no tokenizer accepts it.
    return text if usable and text.isprintable() else ""


def _row(module: str, definition: str, summary: str) -> dict[str, Any]:
    prompt = f"{INSTRUCTION}\n\n```python\n# {module}\n{definition}\n```"
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": summary}],
        "module": module,
    }


def describe_python() -> str:
    """The name of the data set's source in reports."""
    return f"standard library of Python {sys.version.split()[0]}"
