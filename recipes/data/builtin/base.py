"""What a built-in data set is, and how its rows are held out."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import BadRow, Skipped, read_rows


@dataclass
class Loaded:
    """The rows of a built-in data set.

    Attributes:
        rows: plain dicts in the data set's format; some have further columns, such as an answer to check.
        groups: for each row the name of what it belongs to. Rows of one group are never on both sides of a split.
        skipped: what was left out of the original, and why.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def add(self, row: dict[str, Any], group: str) -> None:
        self.rows.append(row)
        self.groups.append(group)


@dataclass(frozen=True)
class BuiltIn:
    """One named data set.

    Attributes:
        name: what stands in `data.source`.
        formats: the format of its rows, then other formats that they can serve as.
        description: what it is and what it is good for, one or two sentences.
        licence: of the data, where it is not the package's too.
        origin: where it comes from, with the version.
        unit: what stays whole when rows are held out, in the plural: "modules".
        load: reads or makes it; fetches it first where it is not in the cache.
        problem: why `load` cannot take these keyword arguments, or None; of those that take none there is no such
            function.
    """

    name: str
    formats: tuple[str, ...]
    description: str
    licence: str
    origin: str
    unit: str
    load: Callable[..., Loaded]
    problem: Callable[[Mapping[str, Any]], str | None] | None = None

    @property
    def format(self) -> str:
        return self.formats[0]


def in_held_out_part(group: str, *, eval_fraction: float, seed: int) -> bool:
    """Whether a group belongs to the held-out part.

    The choice depends on the group's name and the seed alone: a data set that grows holds out the same groups,
    and a smaller share holds out a part of what a larger one does.
    """
    digest = hashlib.blake2b(f"{seed}:{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < eval_fraction * 2**64


def records(path: Path, loaded: Loaded) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of a JSONL or CSV file; what cannot be read goes to `loaded.skipped`."""
    for line, row in read_rows(path):
        if isinstance(row, BadRow):
            loaded.skipped.append(Skipped(str(path), line, row.reason))
        else:
            yield line, row
