"""Keys in which runs differ."""

from collections.abc import Iterator, Sequence
from typing import Any

from .folders import Run

# Where a run is kept and what it is called changes nothing of it.
_NAMES = {"train.output_dir", "train.run_name", "train.logging_dir", "hub.repo"}
# Which of several processes wrote the file.
_RANKS = {"parallel.rank"}
# Beginnings of keys that decide which rows are held out, and as which tokens.
HELD_OUT_BY = ("data.", "model.path", "model.tokenizer", "model.preset", "objective.", "train.max_length", "train.seed")
# Stands where a run does not have a key.
ABSENT = "–"

# A key, and its value in each run in words.
Line = tuple[str, tuple[str, ...]]


def recipe_differences(runs: Sequence[Run]) -> list[Line]:
    """The keys of the resolved recipes that differ; of runs without a recipe nothing is said."""
    known = [run for run in runs if run.recipe]
    if len(known) < 2:
        return []
    return _differing([dict(_leaves(run.recipe)) if run.recipe else None for run in runs], skipped=_NAMES)


def environment_differences(runs: Sequence[Run]) -> list[Line]:
    """Versions, machine and processes that differ; of runs that have not stored them nothing is said."""
    lines: list[Line] = []
    for name in ("versions", "environment", "parallel"):
        stored = [run.metrics.get(name) for run in runs]
        found = [dict(_leaves({name: values})) if values else None for values in stored]
        lines += _differing(found, skipped=_RANKS)
    return lines


def _differing(found: Sequence[dict[str, Any] | None], *, skipped: set[str]) -> list[Line]:
    keys: dict[str, None] = {}
    for values in found:
        keys |= dict.fromkeys(values or ())
    lines = []
    for key in keys:
        words = [ABSENT if each is None else in_words(each.get(key)) for each in found]
        told = {word for word, each in zip(words, found, strict=True) if each is not None}
        if len(told) > 1 and key not in skipped:
            lines.append((key, tuple(words)))
    return lines


def _leaves(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def in_words(value: Any) -> str:
    """A value as a recipe would write it."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return f"[{', '.join(map(in_words, value))}]"
    return str(value)
