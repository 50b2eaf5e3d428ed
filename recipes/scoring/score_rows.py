"""What each row adds to the scores in a run's folder, kept there so that runs can be compared row by row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter

from ..errors import UserError
from ..models import first_line
from ..run_folder import write_text
from .score import Score
from .statistics import MOST_NUMBERS, ByRow

SCORE_ROWS = "scores_rows.json"


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)

    value: float
    statistic: str
    rows: list[list[float]]

    def by_row(self) -> ByRow:
        return ByRow(np.array(self.rows, dtype=np.float64), self.statistic)


# Digest of the data -> name of the score -> its rows.
_Stored = dict[str, dict[str, _Entry]]
_FILE = TypeAdapter(_Stored)


def keep_rows(folder: Path, found: dict[str, Any], scores: Sequence[Score]) -> None:
    """Keep the rows of an evaluation beside those of earlier ones.

    Args:
        found: the evaluation, as `results.as_dict` gives it. Scores of which rows were left out are not kept: which
            rows these are differs by the model.

    Raises:
        UserError: the file cannot be written.
    """
    file = folder / SCORE_ROWS
    try:
        kept = _read(file)
    except UserError:  # it is lost already
        kept = {}
    by_name = {score.name: score for score in scores}
    for entry in found["scores"]:
        score = by_name[entry["name"]]
        data, by_row = found["data"][entry["data"]], score.by_row
        whole = by_row is not None and len(by_row.rows) == data["rows"] and np.isfinite(by_row.rows).all()
        if by_row is not None and whole and by_row.rows.size <= MOST_NUMBERS:
            rows = _Entry(value=score.value, statistic=by_row.statistic, rows=by_row.rows.tolist())
            kept.setdefault(data["digest"], {})[score.name] = rows
    try:
        write_text(file, _FILE.dump_json(kept).decode() + "\n")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error


def with_rows(folder: Path, scores: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Scores of a run's folder, each with `by_row`: None where that is not kept, or is of another evaluation.

    Args:
        scores: with the `digest` of their data.

    Raises:
        UserError: the file is damaged.
    """
    stored = _read(folder / SCORE_ROWS)

    def rows_of(score: dict[str, Any]) -> ByRow | None:
        entry = stored.get(score["digest"] or "", {}).get(score["name"])
        return entry.by_row() if entry is not None and entry.value == score["value"] else None

    return [score | {"by_row": rows_of(score)} for score in scores]


def _read(file: Path) -> _Stored:
    """Raises:
    UserError: the file is damaged, or cannot be read.
    """
    try:
        if not file.is_file():
            return {}
        found = _FILE.validate_json(file.read_bytes())
        for entry in (entry for scores in found.values() for entry in scores.values()):
            entry.by_row()
    except (OSError, ValueError) as error:  # a ValidationError is one
        raise UserError(f"{file} is damaged ({first_line(error)}): remove it, or run `anyformer eval` again") from error
    return found
