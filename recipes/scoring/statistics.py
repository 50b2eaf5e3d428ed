"""Figures that are made of sums over rows: losses, shares, F1, BLEU.

A statistic takes the sums of the columns, shape (..., columns), and gives the figure, shape (...). What each row adds
to the sums is what is kept of it: with that a figure can be drawn again and compared row by row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]
# Of a figure's rows, beyond which they are not kept in a file: some megabytes, as of 10,000 rows and 60 classes.
MOST_NUMBERS = 2_000_000


def ratio(sums: np.ndarray) -> np.ndarray:
    """The first sum over the second, as losses of rows over their numbers of tokens; 0 over 0 is nan."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums[..., 0] / sums[..., 1]


def exp_ratio(sums: np.ndarray) -> np.ndarray:
    """Of `ratio`, as perplexities are."""
    with np.errstate(over="ignore"):
        return np.exp(ratio(sums))


def sum_of_ratios(sums: np.ndarray) -> np.ndarray:
    """Of the quotients of each two columns, as losses that are added though each is a mean of its own; one without
    anything to count is 0."""
    return (sums[..., 0::2] / np.maximum(sums[..., 1::2], 1)).sum(-1)


def expected_run(sums: np.ndarray) -> np.ndarray:
    """1 + a_1 + a_1 a_2 + ... of the quotients of each two columns: tokens of a pass whose drafted ones are right with
    these chances; a place that no row reaches counts as never right."""
    shares = sums[..., 0::2] / np.maximum(sums[..., 1::2], 1)
    return 1 + shares.cumprod(-1).sum(-1)


def share(sums: np.ndarray) -> np.ndarray:
    """As `ratio`; 0 where there is nothing to count, as of F1 without a label on either side."""
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def macro_f1(sums: np.ndarray) -> np.ndarray:
    """2 right / (wanted + given), the mean over the classes that occur; 0 of none. The sums are how often each class is
    right, wanted and given: shape (..., 3 x classes)."""
    right, wanted, given = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0)
    total = wanted + given
    return (2 * right / np.maximum(total, 1)).sum(-1) / np.maximum((total > 0).sum(-1), 1)


def pearson(sums: np.ndarray) -> np.ndarray:
    """Correlation, of the sums of (1, x, y, xx, yy, xy); nan where one side does not vary."""
    count, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        of_both = (count * xx - x * x) * (count * yy - y * y)
        return (count * xy - x * y) / np.sqrt(np.where(of_both > 0, of_both, np.nan))


def _of_corpus(class_name: str) -> Statistic:
    """sacrebleu's figure of a corpus from the sums of what it counts in each row."""

    def statistic(sums: np.ndarray) -> np.ndarray:
        from sacrebleu import metrics

        scorer: Any = getattr(metrics, class_name)()
        flat = sums.reshape(-1, sums.shape[-1])
        found = [scorer._compute_score_from_stats(row.tolist()).score for row in flat]
        return np.array(found).reshape(sums.shape[:-1])

    return statistic


STATISTICS: dict[str, Statistic] = {
    "ratio": ratio,
    "exp_ratio": exp_ratio,
    "sum_of_ratios": sum_of_ratios,
    "expected_run": expected_run,
    "share": share,
    "macro_f1": macro_f1,
    "pearson": pearson,
    "bleu": _of_corpus("BLEU"),
    "chrf": _of_corpus("CHRF"),
}


# Of other statistics than those of two columns, how many they have: this number, or a multiple of it.
_EXACTLY = {"pearson": 6, "bleu": 10, "chrf": 18}
_MULTIPLE = {"sum_of_ratios": 2, "expected_run": 2, "macro_f1": 3}
# Those that sacrebleu makes, which need not be installed where a file of rows is read.
BY_SACREBLEU = ("bleu", "chrf")


def values_of(figures: "Mapping[str, ByRow]") -> dict[str, float]:
    """The figures themselves."""
    return {name: figure.value for name, figure in figures.items()}


@dataclass(frozen=True)
class ByRow:
    """What each row adds to a figure.

    Attributes:
        rows: shape (rows, columns), whose sums the figure is made of.
        statistic: key of `STATISTICS`.

    Raises:
        ValueError: no such statistic, or rows that it cannot be made of.
    """

    rows: np.ndarray
    statistic: str = "ratio"

    def __post_init__(self) -> None:
        if not isinstance(self.statistic, str) or self.statistic not in STATISTICS:
            raise ValueError(f"{self.statistic!r} is no statistic that is known")
        columns, step = self.rows.shape[1] if self.rows.ndim == 2 else 0, _MULTIPLE.get(self.statistic)
        fits = columns and columns % step == 0 if step else columns == _EXACTLY.get(self.statistic, 2)
        if not fits:
            raise ValueError(f"rows of shape {self.rows.shape} make no {self.statistic}")

    @classmethod
    def of_values(cls, values: Sequence[float] | np.ndarray) -> "ByRow":
        """Of a figure that is the mean of one value a row."""
        found = np.asarray(values, dtype=np.float64)
        return cls(np.stack([found, np.ones(len(found))], 1))

    @property
    def value(self) -> float:
        return float(STATISTICS[self.statistic](self.rows.sum(0)))

    def bounds(self) -> tuple[float, float]:
        """See `intervals.interval`."""
        from .intervals import interval

        return interval(self.rows, STATISTICS[self.statistic])

    def bounds_of_difference(self, less: "ByRow") -> tuple[float, float]:
        """Of this figure less another one of the same rows in the same order, drawn in pairs.

        Raises:
            ValueError: they are figures of different kinds, or not of as many rows.
        """
        from .intervals import interval

        if self.statistic != less.statistic or self.rows.shape != less.rows.shape:
            raise ValueError("these are no figures of the same rows")
        statistic, columns = STATISTICS[self.statistic], self.rows.shape[1]

        def subtracted(sums: np.ndarray) -> np.ndarray:
            return statistic(sums[..., :columns]) - statistic(sums[..., columns:])

        return interval(np.concatenate([self.rows, less.rows], 1), subtracted)
