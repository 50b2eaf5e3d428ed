"""Figures in words, as the terminal and the page say them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .collect import Inspection, Shown
    from .statistics import Distribution, Histogram, Pairs, Stops


def number(value: float) -> str:
    """A whole number with separators, another with a decimal, or with three figures where it is small."""
    return f"{int(value):,}" if value == int(value) else f"{value:,.1f}" if abs(value) >= 1 else f"{value:.3g}"


def share(part: float, whole: float) -> str:
    """A percentage; 0 % and 100 % only where it is exactly that."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    return f"{percent:.0f} %" if part in (0, whole) else f"{min(max(percent, 0.1), 99.9):.1f} %"


def in_short(distribution: "Distribution") -> str:
    """A distribution in a line."""
    d = distribution
    words = f"{number(d.smallest)} to {number(d.largest)}, mean {number(d.mean)}, median {number(d.median)}"
    words += f", 90 % up to {number(d.p90)}, 99 % up to {number(d.p99)}"
    return words + (f"; at most {d.limit:,}" if d.limit is not None else "")


def edges_in_words(histogram: "Histogram", *, whole: bool = False, percent: bool = False) -> Iterator[str]:
    """What each bar holds."""
    factor = 100 if percent else 1
    for low, high in pairwise(histogram.edges):
        if whole:
            yield number(low) if high - low == 1 else f"{number(low)} to {number(high - 1)}"
        else:
            yield f"{number(round(factor * low, 9))} to {number(round(factor * high, 9))}{' %' if percent else ''}"


def learned(inspection: "Inspection") -> str:
    """How much is learned from."""
    figures = inspection.train
    if figures.supervised:
        of = f"{figures.supervised:,} of {figures.tokens:,} tokens"
        return f"{of} ({share(figures.supervised, figures.tokens)})"
    return "a label for each row" if figures.classes or figures.values else "no token of the data: answers are sampled"


def stop_line(stops: "Stops") -> str:
    """How many learned parts end."""
    if not stops.checked:
        return "does not apply: nothing here teaches a model where to stop"
    words = f"{share(stops.stopped, stops.checked)} of {stops.checked:,} learned parts end in one"
    return words + (f"; rows that do not: {listed(stops.others)}" if stops.others else "")


def answers(pairs: "Pairs") -> str:
    """The lengths of chosen and rejected answers."""
    count = pairs.chosen.count
    lengths = f"chosen {number(pairs.chosen.mean)} tokens on average, rejected {number(pairs.rejected.mean)}"
    parts = f"{share(pairs.equal, count)} equally long, {share(pairs.longer_chosen, count)} the longer one"
    return f"{lengths}; the shorter one is chosen in {share(pairs.shorter_chosen, count)} of {count:,} pairs ({parts})"


def row_title(shown: "Shown") -> str:
    """The number of a row, why it is shown, and how long it is."""
    sizes = [f"{name} {length.tokens:,}" for name, length in shown.view.lengths.items()]
    if list(shown.view.lengths) == ["row"]:
        sizes = [f"{shown.view.lengths['row'].tokens:,}"]
    return f"Row {shown.number:,}{f' ({shown.why})' if shown.why else ''}: {', '.join(sizes)} tokens"


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{value:,}" for value in numbers)


def repeats_in_words(inspection: "Inspection") -> list[tuple[str, int, str]]:
    """(what, how many, examples) of each kind of repetition; none where rows were not compared."""
    found = inspection.repeats
    if not found.looked_at:
        return []
    lines = [
        ("training rows equal to an earlier one", found.repeated, _groups(inspection, found.repeated_examples)),
        (
            "training rows with a prompt that has several answers",
            found.conflicting,
            _groups(inspection, found.conflicting_examples),
        ),
    ]
    if inspection.held_out:
        across = [_across(inspection, found.held_out_examples), _across(inspection, found.held_out_prompt_examples)]
        lines += [
            ("held-out rows that are training rows too", found.held_out_rows, across[0]),
            ("held-out rows with a prompt that is trained on", found.held_out_prompts, across[1]),
        ]
    return lines


def _groups(inspection: "Inspection", groups: Sequence[Sequence[int]]) -> str:
    return "; ".join(f"rows {', '.join(inspection.named(place) for place in places)}" for places in groups)


def _across(inspection: "Inspection", pairs: Sequence[tuple[int, int]]) -> str:
    return "; ".join(
        f"held-out row {inspection.named(held, held_out=True)} = row {inspection.named(trained)}"
        for held, trained in pairs
    )
