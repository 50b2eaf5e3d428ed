"""All that a comparison of runs says, before it is shown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .differences import Line, environment_differences, recipe_differences
from .figures import Figure, compare_figures, figure_as_dict
from .folders import Run, read_runs
from .scores import ScoreLine, compare_scores, score_as_dict


@dataclass(frozen=True)
class Answers:
    """What runs answer to one prompt; None where one was not asked.

    Attributes:
        start: the answer before training, where all that were asked gave the same; else `before` has each run's.
    """

    prompt: str
    reference: str
    after: tuple[str | None, ...]
    before: tuple[str | None, ...]

    @property
    def start(self) -> str | None:
        told = {answer for answer in self.before if answer is not None}
        return told.pop() if len(told) == 1 else None

    @property
    def asked(self) -> int:
        return sum(answer is not None for answer in self.after)


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; each tuple in it has an entry a run, in their order."""

    runs: list[Run]
    recipe: list[Line]
    environment: list[Line]
    figures: list[Figure]
    scores: list[ScoreLine]
    training: list[Line]
    answers: list[Answers]

    @property
    def names(self) -> list[str]:
        return [run.name for run in self.runs]

    @property
    def remarks(self) -> list[str]:
        """What cannot be shown, and why."""
        found = [remark for run in self.runs for remark in run.remarks]
        answering = [run for run in self.runs if run.samples("after")]
        if len(answering) > 1 and not any(each.asked > 1 for each in self.answers):
            found.append("no two runs were asked the same prompt: their sample answers stand by themselves")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For scripts; without the texts of prompts and answers."""

        def lines(found: Sequence[Line]) -> dict[str, dict[str, str]]:
            return {key: dict(zip(self.names, values, strict=True)) for key, values in found}

        found = {
            "runs": [{"name": run.name, "path": str(run.path), "objective": run.kind} for run in self.runs],
            "remarks": self.remarks,
            "recipe": lines(self.recipe),
            "environment": lines(self.environment),
            "figures": [figure_as_dict(figure, self.runs) for figure in self.figures],
            "scores": [
                {"name": score.name, "data": score.data, "better": score.better, "apart": score.apart}
                | {"runs": dict(zip(self.names, map(score_as_dict, score.cells), strict=True))}
                for score in self.scores
            ],
            "training": lines(self.training),
            "history": {run.name: run.history for run in self.runs},
        }
        return _without_nan(found)


def _without_nan(value: Any) -> Any:
    """The same with None for numbers that JSON does not have, as a run that diverged has logged."""
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Read runs and compare them.

    Raises:
        UserError: see `folders.read_runs`.
    """
    runs = read_runs(folders)
    return Comparison(
        runs,
        recipe_differences(runs),
        environment_differences(runs),
        compare_figures(runs),
        compare_scores(runs),
        _training(runs),
        _answers(runs),
    )


def _training(runs: Sequence[Run]) -> list[Line]:
    """What training took, of what any run has counted."""

    def told(run: Run, section: str, key: str, form: str) -> str:
        value = (run.metrics.get(section) or {}).get(key)
        return f"{value:{form}}" if isinstance(value, int | float) else "–"

    wanted = (
        ("steps", "plan", "steps", ","),
        ("parameters trained", "plan", "trainable", ","),
        ("tokens read", "training", "tokens", ","),
        ("tokens a second", "training", "tokens_per_second", ",.0f"),
        ("memory, GB", "training", "memory_gb", ".2f"),
        ("seconds, from loading to saving", "training", "seconds", ",.0f"),
    )
    lines = [(name, tuple(told(run, section, key, form) for run in runs)) for name, section, key, form in wanted]
    return [line for line in lines if any(value != "–" for value in line[1])]


def _answers(runs: Sequence[Run]) -> list[Answers]:
    """Of each prompt that a run was asked, those of several runs first."""
    prompts: dict[tuple[str, str], None] = {}
    after = [{(s.prompt, s.reference): s.answer for s in run.samples("after")} for run in runs]
    before = [{(s.prompt, s.reference): s.answer for s in run.samples("before")} for run in runs]
    for asked in (*after, *before):
        prompts |= dict.fromkeys(asked)
    found = [
        Answers(*prompt, tuple(each.get(prompt) for each in after), tuple(each.get(prompt) for each in before))
        for prompt in prompts
    ]
    return sorted(found, key=lambda answers: answers.asked < 2)
