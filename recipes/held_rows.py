"""What each held-out row adds to a run's figures, kept with the run so that runs can be compared row by row."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError
from .run_folder import HELD_OUT, write_text
from .scoring.statistics import BY_SACREBLEU, MOST_NUMBERS, ByRow


@dataclass(frozen=True)
class HeldRows:
    """Parts of figures by row, in any order of rows.

    Attributes:
        digests: of each row as the model reads it: equal ones have the same tokens and learn the same of them.
        parts: of each figure that is made of sums over rows, what each row adds to them: of a loss a token its summed
            loss and its number of tokens.
        statistics: of a figure that is no quotient of two sums, how it is made: a key of `STATISTICS`.
    """

    digests: tuple[str, ...]
    parts: Mapping[str, Sequence[Sequence[float]]]
    statistics: dict[str, str] = field(default_factory=dict)

    def by_row(self, name: str) -> ByRow | None:
        """What rows add to a figure; None where it is not kept."""
        if name not in self.parts or not self.digests:
            return None
        return ByRow(np.asarray(self.parts[name], dtype=np.float64), self.statistics.get(name, "ratio"))

    def figures(self) -> dict[str, float]:
        """The figures that the rows make."""
        return {name: found.value for name in self.parts if (found := self.by_row(name)) is not None}

    def adding(self, **figures: ByRow) -> "HeldRows":
        """The same with further figures of the same rows in the same order, but for those of very many numbers."""
        kept = {name: figure for name, figure in figures.items() if figure.rows.size <= MOST_NUMBERS}
        return HeldRows(
            self.digests,
            {**self.parts, **{name: figure.rows.tolist() for name, figure in kept.items()}},
            self.statistics | {name: of.statistic for name, of in kept.items() if of.statistic != "ratio"},
        )

    def in_order(self) -> "HeldRows":
        """The same by digest, so that equal rows of two runs stand at equal places."""
        order = sorted(range(len(self.digests)), key=lambda place: self.digests[place])
        parts = {name: [rows[place] for place in order] for name, rows in self.parts.items()}
        return HeldRows(tuple(self.digests[place] for place in order), parts, self.statistics)


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
    kept[when] = {"rows": rows.digests, "parts": rows.parts, "statistics": rows.statistics}
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
        found = {
            when: HeldRows(tuple(values["rows"]), values["parts"], dict(values.get("statistics", {})))
            for when, values in kept.items()
        }
        for rows in found.values():
            for name, part in rows.parts.items():
                of = ByRow(np.asarray(part, dtype=np.float64), rows.statistics.get(name, "ratio"))
                if of.statistic in BY_SACREBLEU:
                    raise ValueError(f"its {name} is no figure of a run")
                if len(of.rows) != len(rows.digests):
                    raise ValueError(f"its {name} is not of its {len(rows.digests)} rows")
        return {when: rows.in_order() for when, rows in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error}): remove it, or train the run again") from error
