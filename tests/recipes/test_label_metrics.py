"""Figures of labels and answers against values worked out by hand (and, once, compared with seqeval 1.2.2,
scikit-learn 1.9.1 and jiwer 4.0.0 on random data: no difference)."""

import random

import pytest

from anyformer.recipes.label_metrics import (
    accuracy,
    edit_distance,
    error_rate,
    macro_f1,
    marks_spans,
    set_f1,
    span_f1,
    spans,
)


def test_accuracy_and_macro_f1():
    truth, predicted = list("aaabbc"), list("aabbbd")
    assert accuracy(truth, predicted) == pytest.approx(4 / 6)
    # a: 2 of 3 wanted, 2 given -> 4/5; b: 2 of 2, 3 given -> 4/5; c and d: never right.
    assert macro_f1(truth, predicted) == pytest.approx((4 / 5 + 4 / 5 + 0 + 0) / 4)
    assert macro_f1("ab", "ab") == 1


def test_f1_of_sets():
    micro, macro = set_f1([{1, 2}, {2}, set()], [{1}, {2, 3}, set()])
    assert micro == pytest.approx(2 * 2 / (3 + 3))
    assert macro == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert set_f1([set()], [set()]) == (0, 0)


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
    assert span_f1(truth, predicted) == pytest.approx(2 * 1 / (3 + 3))
    assert span_f1(truth, truth) == 1
    assert span_f1([["O"]], [["O"]]) == 0


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
    assert error_rate(["abcd", "ab"], ["abxd", ""]) == pytest.approx((1 + 2) / 6)
    assert error_rate([["a", "b"]], [["a", "b", "c", "d", "e"]]) == pytest.approx(3 / 2)
    assert error_rate([""], [""]) == 0
