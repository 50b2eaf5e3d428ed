"""What each row adds to the scores in a run's folder, kept there so that runs can be compared row by row."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ..errors import UserError
from ..models import first_line
from ..run_folder import write_text
from .score import Score
from .statistics import BY_SACREBLEU, MOST_NUMBERS, ByRow

SCORE_ROWS = "scores_rows.json"


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)

    statistic: str
    rows: list[list[float]]

    def by_row(self) -> ByRow:
        """Raises:
        ValueError: rows that make no such figure.
        """
        return ByRow(np.array(self.rows, dtype=np.float64), self.statistic)


# Evaluation -> name of the score -> its rows.
_Stored = dict[str, dict[str, _Entry]]
_FILE = TypeAdapter(_Stored)


def keep_rows(folder: Path, whole: dict[str, Any], found: dict[str, Any], scores: Sequence[Score]) -> None:
    """Keep the rows of an evaluation beside those of earlier ones, as far as their figures are still there.

    Args:
        whole: all figures of the folder, as `results.write` gives them.
        found: the evaluation, as `results.as_dict` gives it. Scores of which rows were left out are not kept: which
            rows these are differs by the model.

    Raises:
        UserError: the file is damaged, or cannot be written.
    """
    file = folder / SCORE_ROWS
    kept, by_name = _read(file), {score.name: score for score in scores}
    for entry in found["scores"]:
        score, count = by_name[entry["name"]], found["data"][entry["data"]]["rows"]
        of = score.by_row
        complete = of is not None and len(of.rows) == count and np.isfinite(of.rows).all()
        if of is not None and complete and of.rows.size <= MOST_NUMBERS:
            rows = _Entry(statistic=of.statistic, rows=of.rows.tolist())
            kept.setdefault(entry["evaluation"], {})[score.name] = rows
    there = {(entry.get("evaluation"), entry["name"]) for entry in whole["scores"]}
    kept = {which: {n: rows for n, rows in named.items() if (which, n) in there} for which, named in kept.items()}
    try:
        write_text(file, _FILE.dump_json({which: named for which, named in kept.items() if named}).decode() + "\n")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error


def check_rows_file(folder: Path) -> None:
    """Before a model is opened.

    Raises:
        UserError: the file of rows is damaged.
    """
    _read(folder / SCORE_ROWS)


def with_rows(folder: Path, scores: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Scores of a run's folder, each with `by_row`: None where that is not kept, or sacrebleu is needed and not here.

    Raises:
        UserError: the file is damaged.
    """
    stored, able = _read(folder / SCORE_ROWS), find_spec("sacrebleu") is not None

    def rows_of(score: dict[str, Any]) -> ByRow | None:
        entry = stored.get(str(score.get("evaluation")), {}).get(score["name"])
        if entry is None or len(entry.rows) != score["count"] or (entry.statistic in BY_SACREBLEU and not able):
            return None
        return entry.by_row()

    return [score | {"by_row": rows_of(score)} for score in scores]


def _read(file: Path) -> _Stored:
    """Raises:
    UserError: the file is damaged, or cannot be read.
    """
    try:
        if not file.exists():
            return {}
        found = _FILE.validate_json(file.read_bytes())
        for entry in (entry for scores in found.values() for entry in scores.values()):
            if not np.isfinite(entry.by_row().rows).all():
                raise ValueError("a number is not finite")
    except (OSError, ValueError, RecursionError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else first_line(error)
        raise UserError(f"{file} is damaged ({said}): remove it and run `anyformer eval` again") from error
    return found
