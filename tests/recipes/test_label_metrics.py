"""Figures of labels and answers against values worked out by hand (and, once, compared with seqeval 1.2.2,
scikit-learn 1.9.1 and jiwer 4.0.0 on random data: no difference)."""

import random

import pytest

from anyformer.recipes.label_metrics import (
    accuracy,
    edit_distance,
    error_rate,
    exact_match,
    macro_f1,
    marks_spans,
    micro_f1,
    span_f1,
    spans,
)
from anyformer.recipes.scoring.statistics import macro_f1 as macro_f1_of_sums


def test_accuracy_and_macro_f1():
    truth, predicted = ["aa", "abb", "c"], ["aa", "bbb", "d"]  # rows of labels
    assert accuracy(truth, predicted).value == pytest.approx(4 / 6)
    # a: 2 of 3 wanted, 2 given -> 4/5; b: 2 of 2, 3 given -> 4/5; c and d: never right; e does not occur.
    assert macro_f1(truth, predicted, "abcde").value == pytest.approx((4 / 5 + 4 / 5 + 0 + 0) / 4)
    assert macro_f1(["ab"], ["ab"], "ab").value == 1
    assert exact_match(["ab", "c"], ["ab", "d"]).value == 0.5


def test_what_rows_add_makes_the_figure_of_any_of_them():
    rng = random.Random(1)
    truth, predicted = ([rng.choices("abcd", k=3) for _ in range(30)] for _ in range(2))
    whole, chosen = macro_f1(truth, predicted, "abcdef"), [rng.randrange(30) for _ in range(30)]
    drawn = macro_f1([truth[i] for i in chosen], [predicted[i] for i in chosen], "abcd").value
    assert macro_f1_of_sums(whole.rows[chosen].sum(0)) == pytest.approx(drawn)


def test_f1_of_sets():
    truth, predicted = [[1, 2], [2], []], [[1], [2, 3], []]
    assert micro_f1(truth, predicted).value == pytest.approx(2 * 2 / (3 + 3))
    assert macro_f1(truth, predicted, range(5), sets=True).value == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert (micro_f1([[]], [[]]).value, macro_f1([[]], [[]], range(5), sets=True).value) == (0, 0)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O", set()),
        ("B-A I-A O B-B", {("A", 0, 1), ("B", 3, 3)}),
        ("B-A B-A", {("A", 0, 0), ("A", 1, 1)}),
        ("I-A I-A I-B", {("A", 0, 1), ("B", 2, 2)}),  # no B: a span begins all the same
        ("B-A I-B", {("A", 0, 0), ("B", 1, 1)}),
        ("S-A B-B I-B E-B O S-A", {("A", 0, 0), ("B", 1, 3), ("A", 5, 5)}),
        ("B-A E-A I-A", {("A", 0, 1), ("A", 2, 2)}),
        ("E-A E-A", {("A", 0, 0), ("A", 1, 1)}),
        ("U-A B-B L-B L-B", {("A", 0, 0), ("B", 1, 2), ("B", 3, 3)}),
        ("B-A-B I-A-B", {("A-B", 0, 1)}),
    ],
)
def test_spans(tags, found):
    assert spans(tags.split()) == found


def test_span_f1_wants_name_and_both_ends():
    truth = [["B-A", "I-A", "O"], ["B-B", "O", "B-A"]]
    predicted = [["B-A", "I-A", "I-A"], ["B-B", "O", "B-B"]]
    assert span_f1(truth, predicted).value == pytest.approx(2 * 1 / (3 + 3))
    assert span_f1(truth, truth).value == 1
    assert span_f1([["O"]], [["O"]]).value == 0


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["O", "B-PER", "I-PER"], True),
        (["B-PER", "S-X", "E-X", "U-1", "L-1"], True),
        (["O"], False),
        ([], False),
        (["NN", "VB"], False),
        (["B", "I", "O"], False),
        (["O", "B-PER", "noun"], False),
    ],
)
def test_which_tags_mark_spans(tags, expected):
    assert marks_spans(tags) is expected


def test_edit_distance():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert edit_distance("same", "same") == edit_distance("", "") == 0
    assert edit_distance(["a", "cat"], ["a", "dog", "cat"]) == 1


def test_edit_distance_against_its_definition():
    def slow(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    rng = random.Random(0)
    for _ in range(150):
        a, b = ("".join(rng.choices("ab", k=rng.randint(0, 5))) for _ in range(2))
        assert edit_distance(a, b) == slow(a, b)


def test_error_rates():
    assert error_rate(["abcd", "ab"], ["abxd", ""]).value == pytest.approx((1 + 2) / 6)
    assert error_rate([["a", "b"]], [["a", "b", "c", "d", "e"]]).value == pytest.approx(3 / 2)
    assert error_rate([""], [""]).value == 0
