"""A comparison's figures in words, for the terminal and the page alike."""

from .figures import Cell, Estimate, Figure
from .scores import ScoreCell, ScoreLine

NOTE = (
    "95 % intervals by bootstrap over held-out rows. A change is after less before, a difference is this run less the "
    "one named, both over the same rows in pairs; it is beyond chance where its interval leaves out 0. Chance of the "
    "seed and of the order of training is not in them."
)
SCORES_NOTE = (
    "Differences of scores are taken over the same rows in pairs; scores whose rows are not kept or not the same stand "
    "beside each other."
)


def value_in_words(estimate: Estimate | None) -> str:
    """A figure and its interval."""
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.4f}"
    return f"{estimate.value:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"


def signed(estimate: Estimate | None) -> str:
    """A difference and its interval."""
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:+.4f}"
    return f"{estimate.value:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}]"


def verdict(higher_is_better: bool | None, estimate: Estimate | None) -> str:
    """Whether a difference is for the better; "" where nobody can say."""
    if estimate is None or estimate.low is None:
        return ""
    if not estimate.certain:
        return "within chance"
    if higher_is_better is None:
        return "beyond chance"
    return "better" if (estimate.value > 0) == higher_is_better else "worse"


def difference_in_words(figure: Figure, cell: Cell) -> str:
    """The difference from another run, or why there is none."""
    if cell.difference is None:
        return cell.reason or ""
    return _against(cell.difference, cell.against, figure.higher_is_better)


def score_in_words(line: ScoreLine, cell: ScoreCell | None) -> str:
    """A score, and its difference from another run's."""
    if cell is None or cell.difference is None:
        return value_in_words(None if cell is None else cell.estimate)
    difference = _against(cell.difference, cell.against, line.higher_is_better)
    return f"{value_in_words(cell.estimate)}\n{difference}"


def _against(difference: Estimate, other: str | None, higher_is_better: bool | None) -> str:
    said = verdict(higher_is_better, difference)
    return f"{signed(difference)} against {other}{f': {said}' if said else ''}"


def title(name: str) -> str:
    return f"held-out {name.replace('_', ' ')}"
