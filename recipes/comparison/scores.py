"""Figures of `anyformer eval` beside each other, and why they may not be of the same thing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .differences import in_words
from .figures import Estimate
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
class ScoreLine:
    """A figure of `anyformer eval` in each run that has it; `apart`: why they are not of the same thing, if so."""

    name: str
    data: str
    better: str
    cells: tuple[Estimate | None, ...]
    counts: tuple[int | None, ...]
    apart: str | None


def compare_scores(runs: Sequence[Run]) -> list[ScoreLine]:
    """All scores of all runs, by their names and those of their data."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        for score in run.scores:
            found.setdefault((score["name"], score.get("data") or ""), {})[number] = score
    lines = []
    for (name, data), by_run in found.items():
        cells = [by_run.get(number) for number in range(len(runs))]
        counts = tuple(None if cell is None else int(cell["count"]) for cell in cells)
        better = str(next(iter(by_run.values())).get("better", "higher"))
        values = tuple(None if cell is None else _estimate(cell) for cell in cells)
        apart = _apart(name, {runs[number].name: score for number, score in by_run.items()})
        lines.append(ScoreLine(name, data, better, values, counts, apart))
    return lines


def _estimate(score: dict[str, Any]) -> Estimate:
    bounds = score["low"], score["high"]
    sure = not any(bound is None or math.isnan(bound) for bound in bounds)
    return Estimate(float(score["value"]), *map(float, bounds)) if sure else Estimate(float(score["value"]))


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
