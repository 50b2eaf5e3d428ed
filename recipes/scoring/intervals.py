"""Intervals over the rows of an evaluation: bootstrap (Efron 1979; percentile method), and of shares.

Rows are what is drawn again, as the tokens of one row depend on each other. Seeds are fixed: the same rows give the
same interval.
"""

from collections.abc import Callable, Sequence

import numpy as np

LEVEL = 0.95
ROUNDS = 2000
_SEED = 0
_NORMAL = 1.959963984540054  # of the normal law, for `LEVEL`
# Values of drawn rows that are held at once.
_AT_ONCE = 2**22

# Drawn rows (rounds, rows, figures of a row) to one figure a round.
Statistic = Callable[[np.ndarray], np.ndarray]


def mean(rows: np.ndarray) -> np.ndarray:
    """Of rows with one figure each."""
    return rows[..., 0].mean(-1)


def ratio(rows: np.ndarray) -> np.ndarray:
    """Sum of the first figures over the sum of the second, as losses of rows over their numbers of tokens."""
    return rows[..., 0].sum(-1) / rows[..., 1].sum(-1)


def exp_ratio(rows: np.ndarray) -> np.ndarray:
    """Of `ratio`, as perplexities are."""
    return np.exp(ratio(rows))


def interval(rows: Sequence[float] | np.ndarray, statistic: Statistic = mean) -> tuple[float, float]:
    """Bounds between which a figure lies in `LEVEL` of the draws.

    Args:
        rows: figures of each row, shape (rows,) or (rows, figures). Of two models on the same rows, the figures of both
            beside each other, with a statistic that subtracts: that is the paired interval of their difference.

    Returns:
        Low and high; both are nan where there are fewer than two rows, which say nothing of how they differ.
    """
    table = np.asarray(rows, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    count = len(table)
    if count < 2:
        return float("nan"), float("nan")
    rng = np.random.default_rng(_SEED)
    step = max(_AT_ONCE // table.size, 1)
    drawn = [
        statistic(table[rng.integers(0, count, (min(step, ROUNDS - begun), count))]) for begun in range(0, ROUNDS, step)
    ]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(drawn), (tail, 1 - tail))
    return float(low), float(high)


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
