"""Pictures as shapes and words in their places; the page's template draws them as SVG.

A picture is 320 wide and is never shown narrower, so that its words stay readable on a telephone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .statistics import Distribution, Histogram, Pairs
from .wording import edges_in_words, number, share

WIDTH, HEIGHT = 320, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 308, 26, 158
# Of a picture of named bars.
_ROW, _NAME = 24, 118


class Bar(NamedTuple):
    """A bar, and what is said of it to whoever points at it."""

    x: float
    y: float
    width: float
    height: float
    title: str
    series: int = 0


class Word(NamedTuple):
    x: float
    y: float
    text: str
    anchor: str = "middle"


class Line(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float


class Picture(NamedTuple):
    """A picture.

    Attributes:
        caption: what is said below it, and to readers of screens.
        mark, mark_word: a limit.
        series: names of the colours, where there are several.
    """

    title: str
    caption: str
    height: float
    bars: list[Bar]
    words: list[Word]
    grid: list[Line]
    mark: Line | None = None
    mark_word: Word | None = None
    series: Sequence[str] = ()


def histogram(
    title: str,
    caption: str,
    found: Sequence[Histogram],
    *,
    unit: str,
    series: Sequence[str] = (),
    counted: str = "rows",
    limit: int | None = None,
    whole: bool = False,
    percent: bool = False,
) -> Picture:
    """Counts over a range of numbers; several histograms have equal edges and stand side by side."""
    edges, most = found[0].edges, max(max(each.counts) for each in found)
    top, step = _scale(most)
    # A limit far beyond all values is only said.
    seen = limit is not None and limit <= edges[-1] + 0.5 * (edges[-1] - edges[0])
    low, high = edges[0], max(edges[-1], limit or 0) if seen else edges[-1]

    def x(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - low) / (high - low), 1)

    def y(count: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * count / top, 1)

    bars = []
    for place, held in enumerate(edges_in_words(found[0], whole=whole, percent=percent)):
        wide = (x(edges[place + 1]) - x(edges[place]) - 1.5) / len(found)
        for nth, each in enumerate(found):
            if count := each.counts[place]:
                name = f"{series[nth]}: " if series else ""
                tall = max(BOTTOM - y(count), 1)
                left = round(x(edges[place]) + nth * wide, 1)
                said = f"{name}{held}{'' if percent else f' {unit}'}: {count:,}"
                bars.append(Bar(left, BOTTOM - tall, round(wide, 1), tall, said, nth))
    factor = 100 if percent else 1
    every = -(-(len(edges) - 1) // 5)
    below = [Word(x(edge), BOTTOM + 16, number(round(factor * edge, 9))) for edge in edges[::every]]
    counts = [step * n for n in range(int(top / step) + 1)]
    words = [
        *below,
        *(Word(LEFT - 6, y(count) + 4, _brief(count), "end") for count in counts),
        Word((LEFT + RIGHT) / 2, BOTTOM + 34, unit),
        Word(4, 12, counted, "start"),
    ]
    mark = Line(x(limit), TOP - 8, x(limit), BOTTOM) if seen and limit is not None else None
    at_right = mark is not None and mark.x1 > 200
    side = (2, "end") if at_right else (-2, "start")
    mark_word = Word(mark.x1 + side[0], 12, f"limit {limit:,}", side[1]) if mark else None
    grid = [Line(LEFT, y(count), RIGHT, y(count)) for count in counts]
    return Picture(title, caption, HEIGHT, bars, words, grid, mark, mark_word, series)


def _brief(value: int) -> str:
    """A number of an axis, in at most five characters or so."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= 10 * size or (value >= size and size > 10**3):
            return f"{value / size:g}{unit}"
    return f"{value:,}"


def _scale(most: int) -> tuple[int, int]:
    """The top of an axis of counts and the distance of its marks: at most five, at round numbers."""
    step = next(factor * 10**power for power in range(20) for factor in (1, 2, 5) if factor * 10**power * 4 >= most)
    return step * -(-most // step), step


def named_bars(title: str, caption: str, counts: Sequence[tuple[str, int]], *, most_shown: int = 14) -> Picture:
    """A bar for each name, and one for all that are not shown by themselves."""
    shown = list(counts[:most_shown])
    if rest := counts[most_shown:]:
        shown.append((f"{len(rest)} others", sum(count for _, count in rest)))
    most, total = max(count for _, count in shown), sum(count for _, count in counts)
    bars, words = [], []
    for place, (name, count) in enumerate(shown):
        y = 8 + place * _ROW
        wide = max((RIGHT - 88 - _NAME) * count / most, 1)
        bars.append(Bar(_NAME, y, round(wide, 1), _ROW - 7, f"{name}: {count:,}"))
        words.append(Word(_NAME - 6, y + 13, name if len(name) <= 16 else f"{name[:15]}…", "end"))
        words.append(Word(round(_NAME + wide + 5, 1), y + 13, f"{count:,} ({share(count, total)})", "start"))
    return Picture(title, caption, 12 + len(shown) * _ROW, bars, words, [])


def lengths(name: str, found: Distribution, caption: str) -> Picture:
    title = "Length of rows" if name == "row" else f"Length of {name}"
    return histogram(title, caption, [found.histogram], unit="tokens", limit=found.limit, whole=True)


def pairs(found: Pairs, caption: str) -> Picture:
    both = [found.chosen.histogram, found.rejected.histogram]
    return histogram(
        "Chosen and rejected answers",
        caption,
        both,
        unit="tokens",
        series=("chosen", "rejected"),
        counted="pairs",
        whole=True,
    )
