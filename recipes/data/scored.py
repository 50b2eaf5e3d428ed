"""Several answers to a prompt, each with a score: preference pairs of them, or the best alone."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .files import type_name
from .messages import Row, Unusable

# Beyond this a difference of scores is all that a loss with a margin would see.
MAX_SCORE = 1_000_000

ONE_SCORE = "prompts whose answers all have one score"
ONE_ANSWER = "prompts with a single answer"
SAME = "prompts whose best and worst answer are the same"


class Gathered(NamedTuple):
    """Rows made of the scored rows of a source, and how many prompts were left out, by cause."""

    rows: list[Row]
    left_out: Counter[str]


def score(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unusable(f"{name} must be a number, found {type_name(value)}")
    if not abs(value) <= MAX_SCORE:  # neither is NaN
        raise Unusable(f"{name} must be a finite number of at most {MAX_SCORE:,} in size")
    return float(value)


def pairs(rows: Iterable[Row]) -> Gathered:
    """For each prompt its best answer against its worst, with the difference of their scores as the margin.

    Of answers with the same score the first is taken. Rows with one prompt, and the same tools, are one.
    """
    found, left_out = [], Counter[str]()
    for beginning, answers in _by_prompt(rows):
        best, worst = max(answers, key=_score), min(answers, key=_score)
        if len(answers) < 2:
            left_out[ONE_ANSWER] += 1
        elif best[1] == worst[1]:
            left_out[ONE_SCORE] += 1
        elif best[0] == worst[0]:
            left_out[SAME] += 1
        else:
            found.append(beginning | {"chosen": best[0], "rejected": worst[0], "margin": best[1] - worst[1]})
    return Gathered(found, left_out)


def best(rows: Iterable[Row]) -> Gathered:
    """Each prompt with its best answer."""
    found = [beginning | {"completion": max(answers, key=_score)[0]} for beginning, answers in _by_prompt(rows)]
    return Gathered(found, Counter())


_Answer = tuple[Any, float]


def _score(answer: _Answer) -> float:
    return answer[1]


def _by_prompt(rows: Iterable[Row]) -> Iterator[tuple[Row, list[_Answer]]]:
    found: dict[str, tuple[Row, list[_Answer]]] = {}
    for row in rows:
        beginning: Row = {name: row[name] for name in ("prompt", "tools") if name in row}
        _, answers = found.setdefault(json.dumps(beginning, sort_keys=True), (beginning, []))
        answers.extend(zip(row["completions"], row["scores"], strict=True))
    yield from found.values()
