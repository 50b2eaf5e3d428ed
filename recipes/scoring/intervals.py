"""Intervals over the rows of an evaluation: bootstrap (Efron 1979; percentile method), and of shares.

Rows are what is drawn again, as the tokens of one row depend on each other. Seeds are fixed: the same rows give the
same interval.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from .statistics import Statistic, ratio

LEVEL = 0.95
ROUNDS = 2000
_SEED = 0
_NORMAL = 1.959963984540054  # of the normal law, for `LEVEL`
# Weights of rows that are held at once.
_AT_ONCE = 2**22


def interval(rows: Sequence[float] | np.ndarray, statistic: Statistic = ratio) -> tuple[float, float]:
    """Bounds between which a figure lies in `LEVEL` of the draws.

    Args:
        rows: what each row adds to the sums that the figure is made of, shape (rows, columns), or values whose mean it
            is, shape (rows,). Of two models on the same rows, the columns of both beside each other, with a statistic
            that subtracts: that is the paired interval of their difference.

    Returns:
        Low and high. Draws of which there is no figure, as a correlation with a side that does not vary, are left out.
        Both bounds are nan where these are most draws, or where there are fewer than two rows, which say nothing of how
        they differ.
    """
    table = np.asarray(rows, dtype=np.float64)
    table = np.stack([table, np.ones(len(table))], 1) if table.ndim == 1 else table
    if len(table) < 2:
        return float("nan"), float("nan")
    drawn = np.concatenate([statistic(weights @ table) for weights in _weights(len(table))])
    defined = drawn[~np.isnan(drawn)]
    if len(defined) < ROUNDS / 2:
        return float("nan"), float("nan")
    tail = (1 - LEVEL) / 2
    with np.errstate(invalid="ignore"):  # between two infinite ones
        low, high = np.quantile(defined, (tail, 1 - tail))
    return float(low), float(high)


def _weights(count: int) -> Iterator[np.ndarray]:
    """How often each row is drawn in each round, shape (rounds, rows), some rounds at a time."""
    rng = np.random.default_rng(_SEED)
    step = max(_AT_ONCE // count, 1)
    for begun in range(0, ROUNDS, step):
        draws = (rng.integers(0, count, count) for _ in range(min(step, ROUNDS - begun)))
        yield np.stack([np.bincount(draw, minlength=count) for draw in draws]).astype(np.float64)


def share_interval(hits: float, count: int) -> tuple[float, float]:
    """Bounds of a share of rows that are right or wrong (Wilson 1927); a bootstrap of none right would be sure of it.

    Returns:
        Low and high, from 0 to 1; both are nan without rows.
    """
    if not count:
        return float("nan"), float("nan")
    share, spread = hits / count, _NORMAL**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = _NORMAL * np.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    # Rounding would leave a trace where the bound is an end of the scale.
    return 0.0 if hits == 0 else max(float(middle - half), 0.0), 1.0 if hits == count else min(
        float(middle + half), 1.0
    )
