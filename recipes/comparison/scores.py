"""Figures of `anyformer eval` beside each other, their differences, and why they may not be of the same thing."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..scoring.statistics import ByRow
from .differences import in_words
from .figures import Estimate, bounded, counterparts, subtracted
from .folders import Run

_ANSWERED = ("max_new_tokens",)
# Beginnings of the names of scores, and the settings of `eval` without which the figure is another one. The judge of a
# win rate is in its name, limits and tasks are in the digest of the data.
_DEFINED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("perplexity", "pseudo-perplexity"), ("context", "stride")),
    **dict.fromkeys(("exact match", "token F1", "BLEU", "chrF", "win rate"), _ANSWERED),
    "pass@": (*_ANSWERED, "sampling.samples", "sampling.temperature"),
}


@dataclass(frozen=True)
class ScoreCell:
    """A score of one run.

    Attributes:
        difference: this run less `against`, an earlier one of the comparison, of the same rows in pairs; None where
            they are not of the same thing, or rows are not kept.
    """

    estimate: Estimate
    count: int
    difference: Estimate | None = None
    against: str | None = None


@dataclass(frozen=True)
class ScoreLine:
    """A figure of `anyformer eval` in each run.

    Attributes:
        cells: by run; None where a run does not have it.
        apart: why they are not of the same thing, if so.
    """

    name: str
    data: str
    better: str
    cells: tuple[ScoreCell | None, ...]
    apart: str | None

    @property
    def higher_is_better(self) -> bool:
        return self.better == "higher"


def compare_scores(runs: Sequence[Run]) -> list[ScoreLine]:
    """All scores of all runs, by their names and those of their data."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        for score in run.scores:
            found.setdefault((score["name"], score.get("data") or ""), {})[number] = score
    lines = []
    for (name, data), by_run in found.items():
        by_name = {runs[number].name: score for number, score in by_run.items()}
        apart, cells = _apart(name, by_name), {}
        for number, score in by_run.items():
            run = runs[number]
            earlier = counterparts(run, [other for other in runs[:number] if other.name in by_name])
            pairs = ({other.name: by_name[other.name], run.name: score} for other in earlier)
            like = next((next(iter(pair)) for pair in pairs if _apart(name, pair) is None), None)
            cells[number] = _cell(score, like, None if like is None else by_name[like])
        better = str(next(iter(by_run.values())).get("better", "higher"))
        lines.append(ScoreLine(name, data, better, tuple(map(cells.get, range(len(runs)))), apart))
    return lines


def score_as_dict(cell: ScoreCell | None) -> dict[str, Any] | None:
    """As plain data."""
    if cell is None:
        return None
    found = asdict(cell)
    return found.pop("estimate") | found


def _cell(score: dict[str, Any], against: str | None, other: dict[str, Any] | None) -> ScoreCell:
    """A score and, where there is another one of the same thing, its difference from that."""
    bounds = (math.nan if score[bound] is None else float(score[bound]) for bound in ("low", "high"))
    estimate, count = bounded(float(score["value"]), (next(bounds), next(bounds))), int(score["count"])
    of, less = score.get("by_row"), None if other is None else other.get("by_row")
    if other is None or of is None or less is None:
        return ScoreCell(estimate, count)
    return ScoreCell(estimate, count, subtracted(estimate.value - float(other["value"]), of, less), against)


def _apart(name: str, scores: dict[str, dict[str, Any]]) -> str | None:
    """Why the scores of runs, by their names, are not of the same thing; None where they are.

    What is not known to be the same is apart: files of before a digest or the settings were kept say too little.
    """
    if len(scores) < 2:
        return None
    counts = sorted({int(score["count"]) for score in scores.values()})
    if len(counts) > 1:
        return f"not of the same data: {' and '.join(map(str, counts))} counted"
    if silent := [run for run, score in scores.items() if not score.get("digest")]:
        return f"perhaps not of the same data: which rows they are of is not kept by {', '.join(silent)}"
    rows = _groups({run: score["digest"] for run, score in scores.items()})
    if len(rows) > 1:
        return f"not of the same data: other rows in {' than in '.join(', '.join(names) for names in rows.values())}"
    if name.endswith("per token") and _cut_otherwise([score.get("by_row") for score in scores.values()]):
        return "not measured alike: the rows have other tokens"
    if len({(score.get("details") or {}).get("labels") for score in scores.values()}) > 1:
        return "not measured alike: texts were cut, so that other numbers of labels are counted"
    if len({of.rows.shape[1] for score in scores.values() if (of := score.get("by_row")) is not None}) > 1:
        return "not measured alike: the models have other numbers of classes"
    keys = next((keys for start, keys in _DEFINED_BY.items() if name.startswith(start)), ())
    if keys and (silent := [run for run, score in scores.items() if not score.get("settings")]):
        return f"perhaps not measured alike: {', '.join(keys)} not kept by {', '.join(silent)}"
    reasons = []
    for key in keys:
        values = _groups({run: _setting(score["settings"], key) for run, score in scores.items()})
        if len(values) > 1:
            told = " and ".join(f"{value} in {', '.join(names)}" for value, names in values.items())
            reasons.append(f"{key} is {told}")
    return f"not measured alike: {'; '.join(reasons)}" if reasons else None


def _cut_otherwise(rows: Sequence[ByRow | None]) -> bool:
    """Whether the numbers of tokens of the rows are known to differ."""
    counts = [found.rows[:, 1].tolist() for found in rows if found is not None]
    return any(other != counts[0] for other in counts)


def _groups(values: dict[str, str]) -> dict[str, list[str]]:
    """value -> the names of the runs that have it."""
    found: dict[str, list[str]] = {}
    for run, value in values.items():
        found.setdefault(value, []).append(run)
    return found


def _setting(settings: dict[str, Any], key: str) -> str:
    value: Any = settings
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "not set" if value is None else in_words(value)
