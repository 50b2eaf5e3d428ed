"""What each held-out row adds to a run's figures, kept with the run so that runs can be compared row by row."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError
from .run_folder import HELD_OUT, write_text


@dataclass(frozen=True)
class HeldRows:
    """Parts of figures by row, in any order of rows.

    Attributes:
        digests: of each row as the model reads it: equal ones have the same tokens and learn the same of them.
        parts: of each figure that is a sum over rows divided by a sum over rows, such as a loss a token: the two
            summands of each row.
    """

    digests: tuple[str, ...]
    parts: dict[str, list[tuple[float, float]]]

    def in_order(self) -> "HeldRows":
        """The same by digest, so that equal rows of two runs stand at equal places."""
        order = sorted(range(len(self.digests)), key=lambda place: self.digests[place])
        parts = {name: [rows[place] for place in order] for name, rows in self.parts.items()}
        return HeldRows(tuple(self.digests[place] for place in order), parts)


def digest_of(row: dict[str, Any]) -> str:
    """A mark of a tokenised row, whatever its columns and whether they hold lists, arrays or tensors."""
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def mean_rows(rows: Iterable[Any], **values: Iterable[float]) -> HeldRows:
    """Of figures that are means over rows: name -> a value for each row."""
    return HeldRows(
        tuple(digest_of(dict(row)) for row in rows),
        {name: [(float(v), 1.0) for v in found] for name, found in values.items()},
    )


def keep_rows(folder: Path, when: str, rows: HeldRows) -> None:
    """Add what was measured `before` or `after` training to what the folder of a run keeps."""
    file = folder / HELD_OUT
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    kept[when] = {"rows": rows.digests, "parts": rows.parts}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(kept, separators=(",", ":")) + "\n")


def kept_rows(folder: Path) -> dict[str, HeldRows]:
    """`before` and `after` -> the rows that a run measured, in order; empty where it kept none.

    Raises:
        UserError: the file is damaged.
    """
    file = folder / HELD_OUT
    if not file.is_file():
        return {}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        found = {when: HeldRows(tuple(values["rows"]), values["parts"]) for when, values in kept.items()}
        for rows in found.values():
            for part in rows.parts.values():
                if np.asarray(part, dtype=np.float64).shape != (len(rows.digests), 2):
                    raise ValueError("its rows have not two numbers each")
        return {when: rows.in_order() for when, rows in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error}): remove it, or train the run again") from error
