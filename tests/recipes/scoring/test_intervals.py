"""Intervals hold what they should hold as often as they should."""

import math

import numpy as np
import pytest

from anyformer.recipes.scoring.intervals import LEVEL, ROUNDS, interval, share_interval
from anyformer.recipes.scoring.statistics import STATISTICS, ByRow, exp_ratio, ratio


def test_a_mean_has_the_interval_of_the_normal_law():
    rows = np.random.default_rng(3).normal(2.0, 1.5, 4000)
    low, high = interval(rows)
    expected = 1.96 * rows.std(ddof=1) / math.sqrt(len(rows))
    assert low == pytest.approx(rows.mean() - expected, abs=0.1 * expected)
    assert high == pytest.approx(rows.mean() + expected, abs=0.1 * expected)


def test_the_true_value_lies_inside_as_often_as_promised():
    rng = np.random.default_rng(5)
    held = sum(low <= 0.3 <= high for low, high in (interval(rng.random(60) < 0.3) for _ in range(300)))
    assert abs(held / 300 - LEVEL) < 0.04


def test_ratios_weigh_rows_by_their_tokens_and_are_drawn_by_row():
    table = np.array([[2.0, 1.0], [3.0, 3.0], [10.0, 4.0]])
    sums = table.sum(0)
    assert ratio(sums) == pytest.approx(15 / 8) and exp_ratio(sums) == pytest.approx(math.exp(15 / 8))
    low, high = interval(table, ratio)
    assert 1.0 <= low < 15 / 8 < high <= 2.5


def test_pairs_leave_out_what_rows_share():
    rng = np.random.default_rng(7)
    hardness = rng.normal(0, 5, 200)
    first, second = hardness + rng.normal(0, 0.1, 200), hardness + 0.2 + rng.normal(0, 0.1, 200)
    low, high = ByRow.of_values(second).bounds_of_difference(ByRow.of_values(first))
    assert 0.1 < low < 0.2 < high < 0.3
    assert np.subtract(*ByRow.of_values(second).bounds()[::-1]) > 1  # each by itself


def test_the_same_rows_give_the_same_interval_and_one_row_gives_none():
    rows = np.arange(50.0)
    assert interval(rows) == interval(rows) == interval(np.stack([rows, np.ones(50)], 1), ratio)
    assert all(math.isnan(bound) for bound in interval([1.0]))


def test_shares_have_the_interval_of_wilson():
    """Values of Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for hits, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        assert share_interval(hits, count) == pytest.approx((low, high), abs=5e-5)
    assert share_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert share_interval(5, 5)[1] == 1.0 and all(math.isnan(bound) for bound in share_interval(0, 0))


def test_drawing_by_weights_is_drawing_rows():
    table = np.random.default_rng(2).uniform(1, 5, (17, 2))
    drawn = table[np.random.default_rng(0).integers(0, 17, (ROUNDS, 17))].sum(1)
    assert interval(table, exp_ratio) == pytest.approx(np.quantile(exp_ratio(drawn), (0.025, 0.975)))


def test_statistics_by_hand():
    assert STATISTICS["sum_of_ratios"](np.array([6.0, 2, 1, 4, 0, 0])) == 3.25
    assert STATISTICS["expected_run"](np.array([1.0, 2, 3, 4, 0, 0])) == 1 + 1 / 2 + 1 / 2 * 3 / 4
    assert STATISTICS["share"](np.array([0.0, 0])) == 0 and math.isnan(ratio(np.zeros(2)))
    x, y = np.random.default_rng(4).normal(size=(2, 40))
    y += x
    sums = np.stack([np.ones(40), x, y, x * x, y * y, x * y], 1).sum(0)
    assert STATISTICS["pearson"](sums) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert math.isnan(STATISTICS["pearson"](np.array([3.0, 3, 6, 3, 12, 6])))  # nothing varies


def test_figures_of_other_kinds_or_rows_are_not_subtracted():
    of = ByRow.of_values([1.0, 2.0])
    for other in (ByRow(of.rows, "exp_ratio"), ByRow.of_values([1.0])):
        with pytest.raises(ValueError, match="no figures of the same rows"):
            of.bounds_of_difference(other)


def test_draws_without_a_figure_are_left_out():
    x = np.zeros(40)
    x[3] = 1  # in two draws of three
    y = x + np.random.default_rng(1).normal(size=40)
    low, high = ByRow(np.stack([np.ones(40), x, y, x * x, y * y, x * y], 1), "pearson").bounds()
    assert -1 <= low < high <= 1
    assert all(math.isnan(bound) for bound in interval(np.zeros((9, 2)), ratio))
