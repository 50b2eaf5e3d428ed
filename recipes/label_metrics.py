"""Figures of predictions against what the data say: closed formulas over plain lists, row by row."""

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from .scoring.statistics import ByRow

Span = tuple[str, int, int]
Labels = Sequence[Sequence[Hashable]]
_SPAN_TAG = re.compile(r"O|[BIESLU]-.+")


def _table(rows: Iterable[Sequence[float]]) -> np.ndarray:
    return np.array(list(rows), dtype=np.float64)


def accuracy(truth: Labels, predicted: Labels) -> ByRow:
    """Share of labels that are right, place by place in each row."""
    pairs = zip(truth, predicted, strict=True)
    return ByRow(_table((sum(a == b for a, b in zip(*pair, strict=True)), len(pair[0])) for pair in pairs))


def exact_match(truth: Sequence[Any], predicted: Sequence[Any]) -> ByRow:
    """Share of rows that are right as a whole."""
    return ByRow.of_values([a == b for a, b in zip(truth, predicted, strict=True)])


def macro_f1(truth: Labels, predicted: Labels, classes: Sequence[Hashable], *, sets: bool = False) -> ByRow:
    """Mean over classes of 2 TP / (2 TP + FP + FN), over the classes that occur on either side.

    Args:
        classes: all that there are.
        sets: a row is a set of labels on each side; else its labels are compared place by place.
    """
    places = {name: place for place, name in enumerate(classes)}
    table = np.zeros((len(truth), 3, len(classes)))
    for row, (wanted, given) in enumerate(zip(truth, predicted, strict=True)):
        same = set(wanted) & set(given) if sets else [a for a, b in zip(wanted, given, strict=True) if a == b]
        for kind, names in enumerate((same, wanted, given)):
            for name in names:
                table[row, kind, places[name]] += 1
    return ByRow(table.reshape(len(truth), -1), "macro_f1")


def micro_f1(truth: Labels, predicted: Labels) -> ByRow:
    """2 TP / (2 TP + FP + FN) over the sets of labels of all rows; 0 where there is no label on either side."""
    pairs = [(set(a), set(b)) for a, b in zip(truth, predicted, strict=True)]
    return ByRow(_table((2 * len(a & b), len(a) + len(b)) for a, b in pairs), "share")


def marks_spans(tags: Iterable[str]) -> bool:
    """Whether tags mark spans: BIO, BIOES or BILOU, with names as in `B-PER`."""
    names = set(tags)
    return names != {"O"} and all(_SPAN_TAG.fullmatch(name) for name in names) and bool(names)


def spans(tags: Sequence[str]) -> set[Span]:
    """The (name, first, last) of each span, read as leniently as conlleval does: a span begins at B, S or U, and
    wherever I or E follows another name or nothing; it ends before what begins another, and at E, S or L."""
    found: set[Span] = set()
    first, inside = 0, ""  # where the open span began, and its name
    for index, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        if inside and (mark in "OBSU" or name != inside):
            found.add((inside, first, index - 1))
            inside = ""
        if mark != "O" and not inside:
            first, inside = index, name
        if inside and mark in "ESLU":
            found.add((inside, first, index))
            inside = ""
    return found


def span_f1(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> ByRow:
    """Micro F1 of the spans of all rows; right are those with name and both ends right."""
    wanted, given = ([sorted(spans(row)) for row in side] for side in (truth, predicted))
    return micro_f1(wanted, given)


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Fewest insertions, deletions and replacements that turn `a` into `b` (Levenshtein 1966)."""
    numbers: dict[Hashable, int] = {}
    left, right = (np.array([numbers.setdefault(x, len(numbers)) for x in side], dtype=np.int64) for side in (a, b))
    steps = np.arange(len(right) + 1)
    row = steps.copy()
    for index, item in enumerate(left):
        best = np.concatenate(([index + 1], np.minimum(row[1:] + 1, row[:-1] + (right != item))))
        # Insertions run along the row: the cheapest start, and one more for each place from there.
        row = np.minimum.accumulate(best - steps) + steps
    return int(row[-1])


def error_rate(references: Labels, answers: Labels) -> ByRow:
    """Edit distance of all answers to their references, divided by the length of the references: of characters or of
    words, whichever the sequences hold. It exceeds 1 where answers are much too long."""
    pairs = zip(references, answers, strict=True)
    return ByRow(_table((edit_distance(b, a), len(a)) for a, b in pairs), "share")
