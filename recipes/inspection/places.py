"""Where rows stand in their files, found by reading these again: only the few rows that are named need a place."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.files import BadRow, place, read_rows
from ..data.formats import SHAPES, Unusable
from .statistics import Row, fingerprint


def find_places(rows: Mapping[int, Row], files: Sequence[str], columns: Mapping[str, str]) -> dict[int, str]:
    """The file and line of rows; those that cannot be found are left out.

    Args:
        rows: number -> row in its canonical form; equal rows by ascending number stand in the files in that order.
        files: what was read; what is no file is passed over.
        columns: the recipe's `data.columns`.
    """
    wanted: dict[bytes, list[int]] = {}
    for number in sorted(rows):
        wanted.setdefault(fingerprint(rows[number]), []).append(number)
    found: dict[int, str] = {}
    for name in files:
        if len(found) == len(rows) or not Path(name).is_file():
            continue
        for line, raw in read_rows(Path(name)):
            if isinstance(raw, BadRow):
                continue
            numbers = next(filter(None, (wanted.get(fingerprint(row)) for row in _readings(raw, columns))), None)
            if numbers:
                found[numbers.pop(0)] = place(name, line)
                if len(found) == len(rows):
                    break
    return found


def _readings(raw: Row, columns: Mapping[str, str]) -> Iterator[Row]:
    """What a row can be taken for."""
    row = _renamed(raw, columns)
    for shape in SHAPES:
        if shape.fits(row):
            try:
                yield shape.convert(row)
            except Unusable:
                continue


def _renamed(raw: Row, columns: Mapping[str, str]) -> Row:
    row = dict(raw)
    for ours, theirs in columns.items():
        outer, dot, inner = (theirs, "", "") if theirs in raw else theirs.partition(".")
        value: Any = raw.get(outer)
        row.pop(outer, None)
        row[ours] = value.get(inner) if dot and isinstance(value, dict) else value
    return row
