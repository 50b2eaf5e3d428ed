"""What `data.source` may say: built-in data sets, files, data sets of the Hub and Python functions, one or several."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError
from ..user_code import in_file
from .builtin import BUILT_IN
from .files import exists

HUB = "hub:"
# Keys of a mapping that say where rows are, and what else goes with each.
PLACES: dict[str, tuple[str, ...]] = {"path": (), "hub": ("config", "split", "revision"), "python": ("arguments",)}
Kind = Literal["built-in", "files", "hub", "python"]


@dataclass(frozen=True)
class Source:
    """One place that rows come from, and how they are read.

    Attributes:
        setting: the key of the recipe that names it, such as `data.source.1`.
        kind: where it is.
        where: a name in BUILT_IN; a path, a folder or a glob; an id on the Hub; FILE.py:FUNCTION.
        format, columns, on_bad_row: its own, or those of the section.
        max_rows: at most so many training rows of it.
        weight: share in an epoch; None where the recipe gives none.
        config, split, revision: of a data set of the Hub.
        arguments: of a function, or of a built-in data set that takes some.
        own: keys that the recipe gives beside the place.
    """

    setting: str
    kind: Kind
    where: str
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    on_bad_row: str = "error"
    max_rows: int | None = None
    weight: float | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    own: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """What it is called in reports and messages."""
        return f"{HUB}{self.where}" if self.kind == "hub" else self.where

    def setting_of(self, key: str) -> str:
        """Where a key stands in the recipe: beside the source, or in the section for all."""
        return f"{self.setting}.{key}" if key in self.own else f"data.{key}"


def sources_of(value: Any, setting: str, section: Any) -> list[Source]:
    """The sources that a recipe's value names.

    Args:
        value: text, a mapping, or a list of these.
        section: the `data` section, whose format, columns and on_bad_row hold where a source has none of its own.

    Raises:
        UserError: a name that was meant as a built-in data set or an id on the Hub, and is none.
    """
    several = isinstance(value, list | tuple)
    items = list(value) if several else [value]
    if not items:
        raise UserError(f"{setting}: names no file.")
    return [
        _source(item, f"{setting}.{n}" if several and len(items) > 1 else setting, section)
        for n, item in enumerate(items)
    ]


def _source(item: Any, setting: str, section: Any) -> Source:
    given = {k: v for k, v in item.items() if v is not None} if isinstance(item, Mapping) else {"path": str(item)}
    place = next((name for name in PLACES if name in given), None)
    if place is None:
        raise UserError(f"{setting}: needs one of {', '.join(PLACES)}.")
    kind, where = kind_of_place(given.pop(place), place)
    defaults = {name: getattr(section, name) for name in ("format", "columns", "on_bad_row")}
    if kind == "hub" and (problem := hub_problem(where)):
        raise UserError(f"{setting}: {problem}.")
    if kind == "files":
        _check_name(where, setting)
    return Source(setting, kind, where, own=frozenset(given), **(defaults | given))


def kind_of_place(where: str, place: str = "path") -> tuple[Kind, str]:
    """What a name stands for, and the name without a mark of it."""
    if place == "hub" or where.startswith(HUB):
        return "hub", where.removeprefix(HUB)
    if place == "python" or in_file(where):
        return "python", where
    return ("built-in" if where in BUILT_IN else "files"), where


def hub_problem(name: str) -> str | None:
    """Why a name cannot be an id of the Hub; or None."""
    part = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
    return None if re.fullmatch(rf"{part}(/{part})?", name) else f"{name!r} is no data set's id: write hub:user/name"


def local_places(value: Any) -> Iterator[str]:
    """The paths, folders and globs among the sources, and the files of functions."""
    for item in value if isinstance(value, list | tuple) else [value]:
        name = item.get("path") or item.get("python") if isinstance(item, Mapping) else item
        if name is None:
            continue
        kind, where = kind_of_place(name, "python" if isinstance(item, Mapping) and item.get("python") else "path")
        if kind == "files":
            yield where
        elif kind == "python" and (place := in_file(where)):
            yield place[0]


def _check_name(name: str, setting: str) -> None:
    """Raises UserError for a name that was meant as a built-in data set; no file can be read without a suffix."""
    if exists(Path(name).expanduser()) or not re.fullmatch(r"[\w-]+", name):
        return
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    if near:
        raise UserError(f"{setting}: no file matches {name!r}. Did you mean the built-in data set {near[0]}?")
