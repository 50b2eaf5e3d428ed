"""The arithmetic of epochs: hand-computed ratios, and what must hold for any sizes and weights."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyformer.recipes.data import Mixture

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def test_rows_stand_in_the_ratio_of_the_weights():
    assert Mixture([900, 100], [1, 1]).rows_per_epoch == [500, 500]
    assert Mixture([900, 100], [3, 1]).rows_per_epoch == [750, 250]
    assert Mixture([900, 100], [3, 1], epoch_rows=80).rows_per_epoch == [60, 20]
    assert Mixture([900, 100], [1.5e308, 1.5e308]).rows_per_epoch == [500, 500]  # whose sum no number holds
    assert Mixture([1, 1, 1], [1, 1, 1], epoch_rows=4).rows_per_epoch == [2, 1, 1]
    assert Mixture([10, 20, 30], [0.2, 0.3, 0.5]).rows_per_epoch == [12, 18, 30]


def test_without_weights_every_row_comes_once():
    mixture = Mixture([3, 2])
    assert len(mixture) == 5
    assert mixture.epoch(0) == mixture.epoch(7) == [0, 1, 2, 3, 4]


def test_a_small_source_repeats_its_rows_and_a_large_one_is_drawn_from():
    mixture = Mixture([900, 100], [1, 1], seed=3)
    for number in range(4):
        counts = Counter(mixture.epoch(number))
        assert {counts[row] for row in range(900, 1000)} == {5}
        assert sum(counts[row] for row in range(900)) == 500 and max(counts[row] for row in range(900)) == 1
    # 900 rows and 500 an epoch: after nine epochs each has come five times.
    drawn = Counter(row for number in range(9) for row in mixture.epoch(number) if row < 900)
    assert set(drawn.values()) == {5} and len(drawn) == 900


def test_a_source_runs_through_a_permutation_and_then_another():
    mixture = Mixture([12, 12], [1, 3], epoch_rows=16, seed=5)  # 4 and 12 rows an epoch
    cycles = [[row for n in range(3 * k, 3 * k + 3) for row in mixture.epoch(n) if row < 12] for k in range(3)]
    assert all(sorted(cycle) == list(range(12)) for cycle in cycles)
    assert len({tuple(cycle) for cycle in cycles}) == 3


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, data=st.data())
def test_rows_of_a_source_are_given_equally_often(sizes, data):
    weights = data.draw(st.lists(st.floats(0.05, 20), min_size=len(sizes), max_size=len(sizes)))
    rows = data.draw(st.integers(1, 120))
    mixture = Mixture(sizes, weights, epoch_rows=rows, seed=data.draw(st.integers(0, 5)))
    assert sum(mixture.rows_per_epoch) == rows == len(mixture)
    total: Counter[int] = Counter()
    for number in range(9):
        epoch = mixture.epoch(number)
        counts = Counter(epoch)
        assert epoch == sorted(epoch) and len(epoch) == rows
        total += counts
        start = 0
        for size, share, weight in zip(sizes, mixture.rows_per_epoch, weights, strict=True):
            assert abs(share - weight / sum(weights) * rows) < 1
            own, all_own = ([c[row] for row in range(start, start + size)] for c in (counts, total))
            assert sum(own) == share
            assert set(own) <= {share // size, -(-share // size)}
            given_by_now = share * (number + 1)
            assert set(all_own) <= {given_by_now // size, math.ceil(given_by_now / size)}
            start += size


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, number=st.integers(0, 10_000))
def test_any_epoch_can_be_asked_for_alone(sizes, number):
    weights = [1.0 + place for place in range(len(sizes))]
    one, other = (Mixture(sizes, weights, seed=1) for _ in range(2))
    for earlier in (0, number // 2, number + 1):
        other.epoch(earlier)
    assert one.epoch(number) == other.epoch(number)


def test_seeds_differ():
    draws = {tuple(Mixture([100, 10], [1, 1], seed=seed).epoch(0)) for seed in range(4)}
    assert len(draws) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "every source needs a row"),
        (([3, 0],), "every source needs a row"),
        (([3, 2], [1]), "needs 2 weights"),
        (([3, 2], [1, 0]), "needs 2 weights above 0"),
        (([3, 2], [1, math.inf]), "needs 2 weights above 0"),
        (([3, 2], [1, math.nan]), "needs 2 weights above 0"),
        (([3, 2], None, 0), "epoch_rows must be at least 1"),
    ],
)
def test_what_makes_no_mixture(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mixture(*arguments)
