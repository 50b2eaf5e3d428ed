"""Figures of predictions against what the data say: closed formulas over plain lists."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

Span = tuple[str, int, int]
_SPAN_TAG = re.compile(r"O|[BIESLU]-.+")


def accuracy(truth: Sequence[Hashable], predicted: Sequence[Hashable]) -> float:
    """Share of predictions that are right."""
    return sum(a == b for a, b in zip(truth, predicted, strict=True)) / len(truth)


def macro_f1(truth: Sequence[Hashable], predicted: Sequence[Hashable]) -> float:
    """Mean over classes of 2 TP / (2 TP + FP + FN), over the classes that occur on either side."""
    wanted, given = Counter(truth), Counter(predicted)
    right = Counter(a for a, b in zip(truth, predicted, strict=True) if a == b)
    classes = wanted.keys() | given.keys()
    return sum(2 * right[name] / (wanted[name] + given[name]) for name in classes) / len(classes)


def set_f1(truth: Sequence[Iterable[Hashable]], predicted: Sequence[Iterable[Hashable]]) -> tuple[float, float]:
    """Micro and macro F1 of sets of labels, one set a row; 0 where there is no label on either side."""
    pairs = [(set(a), set(b)) for a, b in zip(truth, predicted, strict=True)]
    wanted, given, right = (
        Counter(label for pair in pairs for label in chosen(pair))
        for chosen in (lambda pair: pair[0], lambda pair: pair[1], lambda pair: pair[0] & pair[1])
    )
    classes = wanted.keys() | given.keys()
    if not classes:
        return 0.0, 0.0
    micro = 2 * right.total() / (wanted.total() + given.total())
    return micro, sum(2 * right[name] / (wanted[name] + given[name]) for name in classes) / len(classes)


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


def span_f1(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """2 right / (wanted + given) over the spans of all rows; right are those with name and both ends right; 0 where
    there is none."""
    wanted, given = [spans(row) for row in truth], [spans(row) for row in predicted]
    right = sum(len(a & b) for a, b in zip(wanted, given, strict=True))
    total = sum(map(len, wanted)) + sum(map(len, given))
    return 2 * right / total if total else 0.0


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


def error_rate(references: Sequence[Sequence[Hashable]], answers: Sequence[Sequence[Hashable]]) -> float:
    """Edit distance of all answers to their references, divided by the length of the references: of characters or of
    words, whichever the sequences hold. It exceeds 1 where answers are much too long."""
    distance = sum(edit_distance(a, b) for a, b in zip(answers, references, strict=True))
    return distance / max(sum(map(len, references)), 1)
