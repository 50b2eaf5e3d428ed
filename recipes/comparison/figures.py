"""Held-out figures of runs with intervals, and their differences where they are of the same rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..held_rows import HeldRows
from ..scoring.statistics import ByRow
from .differences import HELD_OUT_BY, recipe_differences
from .folders import Run

# Figures that are computed from another one's rows, and how.
_DERIVED = {"perplexity": ("loss", "exp_ratio")}
# Objectives whose loss is the cross-entropy of the row's labels.
_CROSS_ENTROPY = {"sft", "pretrain", "distill"}
_FROM_START = ("model.path", "model.preset", "model.config", "adapter.path", "train.beta")
# What figures of an objective are measured by, beside the model: values of other settings are of other figures.
_MEASURES: dict[str, tuple[str, ...]] = {
    "dpo": _FROM_START,
    "kto": (*_FROM_START, "train.desirable_weight", "train.undesirable_weight"),
    "distill": ("objective.teacher", "train.beta"),
    **dict.fromkeys(("orpo", "cpo", "simpo"), ("train.beta", "train.loss_type")),
    **dict.fromkeys(("grpo", "rloo", "ppo"), ("objective.reward",)),
}
# Figures of which more is better, where the run does not say it.
_HIGHER = ("accuracy", "f1", "margin", "reward", "stopped", "match", "bleu", "chrf", "log_ratio", "tokens_a_pass")


@dataclass(frozen=True)
class Estimate:
    """A figure, and the bounds of its 95 % interval; both None where no rows are known."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def certain(self) -> bool:
        """Of a difference: 0 lies outside its interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Cell:
    """A figure of one run.

    Attributes:
        change: after less before, of the same rows.
        difference: after training, this run less run `against`, an earlier one of the comparison.
        reason: why there is no difference.
    """

    before: Estimate | None
    after: Estimate | None
    change: Estimate | None = None
    difference: Estimate | None = None
    against: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Figure:
    """A figure of all runs.

    Attributes:
        higher_is_better: None where nobody has said.
        cells: by run; None where a run does not have the figure.
    """

    name: str
    higher_is_better: bool | None
    cells: tuple[Cell | None, ...]


def compare_figures(runs: Sequence[Run]) -> list[Figure]:
    """All figures of all runs, those of the first run first."""
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.shown)
    return [Figure(name, _direction(name, runs), tuple(_cells(name, runs))) for name in names]


def _cells(name: str, runs: Sequence[Run]) -> list[Cell | None]:
    cells: list[Cell | None] = []
    for number, run in enumerate(runs):
        if name not in run.shown:
            cells.append(None)
            continue
        before, after = (_estimate(run, when, name) for when in ("before", "after"))
        change = _difference(run, "before", run, "after", name)
        if after is None:
            cells.append(Cell(before, None))
            continue
        having = [other for other in counterparts(run, runs[:number]) if name in other.figures("after")]
        like = next((other for other in having if not _apart(other, run, name)), None)
        if like is not None:
            cells.append(Cell(before, after, change, _difference(like, "after", run, "after", name), like.name))
        else:
            reason = f"not comparable with {having[0].name}: {_apart(having[0], run, name)}" if having else None
            cells.append(Cell(before, after, change, reason=reason))
    return cells


def counterparts(run: Run, others: Sequence[Run]) -> list[Run]:
    """The others, those in folders of the same name first: the same stage of another pipeline."""
    return sorted(others, key=lambda other: other.path.resolve().name != run.path.resolve().name)


def _direction(name: str, runs: Sequence[Run]) -> bool | None:
    for run in runs:
        measured = run.metrics.get("measured") or {}
        if (measured.get("shown") or [None])[0] == name:
            return bool(measured.get("higher_is_better"))
    if any(word in name for word in _HIGHER):
        return True
    return False if any(word in name for word in ("loss", "perplexity", "error", "divergence")) else None


def _part(rows: HeldRows | None, name: str) -> ByRow | None:
    """What each row adds to a figure; None where it is not kept."""
    source, statistic = _DERIVED.get(name, (name, None))
    found = None if rows is None else rows.by_row(source)
    return found if found is None or statistic is None else replace(found, statistic=statistic)


def _estimate(run: Run, when: str, name: str) -> Estimate | None:
    figures = run.figures(when)
    if name not in figures:
        return None
    part = _part(run.rows.get(when), name)
    return Estimate(figures[name]) if part is None else bounded(figures[name], part.bounds())


def _difference(one: Run, when: str, other: Run, then: str, name: str) -> Estimate | None:
    """The figure of the other less that of the one, paired by row; None where the rows are not known to be the same.

    A run that goes on, or was killed, may keep the rows of figures that it has not written.
    """
    if name not in one.figures(when) or name not in other.figures(then):
        return None
    first, second = one.rows.get(when), other.rows.get(then)
    if first is None or second is None or first.digests != second.digests:
        return None
    of_one, of_other = _part(first, name), _part(second, name)
    if of_one is None or of_other is None:
        return None
    return subtracted(other.figures(then)[name] - one.figures(when)[name], of_other, of_one)


def subtracted(value: float, of: ByRow, less: ByRow) -> Estimate | None:
    """A difference of figures of the same rows; None where they are made in other ways."""
    if of.statistic != less.statistic or of.rows.shape != less.rows.shape:
        return None
    return bounded(value, of.bounds_of_difference(less))


def bounded(value: float, bounds: tuple[float, float]) -> Estimate:
    """A figure with its bounds, where there are any."""
    return Estimate(value, *bounds) if np.isfinite(bounds).all() else Estimate(value)


def _apart(one: Run, other: Run, name: str) -> str | None:
    """Why two runs' figures are not of the same thing; None where they are."""
    plain = {one.kind, other.kind} <= _CROSS_ENTROPY and _DERIVED.get(name, (name,))[0] == "loss"
    if one.kind != other.kind and not plain:
        return f"the objectives are {one.kind} and {other.kind}"
    differ = [key for key, _ in recipe_differences([one, other])]
    if not plain and (measured := [key for key in differ if key.startswith(_MEASURES.get(one.kind, ()))]):
        return f"it is measured by {', '.join(measured)}, in which the recipes differ"
    first, second = one.rows.get("after"), other.rows.get("after")
    for run, rows in ((one, first), (other, second)):
        if _part(rows, name) is None:
            return f"{run.name} keeps no {name.replace('_', ' ')} of single rows"
    assert first is not None and second is not None
    parts = [_part(rows, name) for rows in (first, second)]
    if len({part.rows.shape[1] for part in parts if part is not None}) > 1:
        return "it is made of other numbers of classes"
    if first.digests == second.digests:
        return None
    return _rows_apart(first.digests, second.digests) + _cause([key for key in differ if key.startswith(HELD_OUT_BY)])


def _rows_apart(first: Sequence[str], second: Sequence[str]) -> str:
    shared = len(set(first) & set(second))
    if not shared:
        return f"no held-out row is the same, as tokens, of {len(first):,} and {len(second):,}"
    return f"{shared:,} held-out rows are the same, as tokens, of {len(first):,} and {len(second):,}"


def _cause(keys: Sequence[str]) -> str:
    return f" (the recipes differ in {', '.join(keys[:4])}{', …' if len(keys) > 4 else ''})" if keys else ""


def figure_as_dict(figure: Figure, runs: Sequence[Run]) -> dict[str, Any]:
    """As plain data, by the names of the runs."""
    from dataclasses import asdict

    cells = {run.name: None if cell is None else asdict(cell) for run, cell in zip(runs, figure.cells, strict=True)}
    return {"name": figure.name, "higher_is_better": figure.higher_is_better, "runs": cells}
