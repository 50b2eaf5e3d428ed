"""Figures on rows and on their tokens. Nothing here reads a file or prints."""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ..data import prompt_key
from ..tokens.report import IGNORE
from ..tokens.views import RowView, TokenSequence

Row = dict[str, Any]

# So many bars stand in a histogram, fewer of few values; and so many examples beside a count.
BARS = (5, 16)
EXAMPLES = 5


@dataclass(frozen=True)
class Histogram:
    """How often values fall between two edges.

    Attributes:
        edges: one more than `counts`, evenly spaced.
        counts: of values from an edge up to the next, that not included but for the last.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Sequence[float], *, whole: bool = False) -> "Histogram":
        """A histogram with edges at round numbers.

        Args:
            whole: the values are whole numbers, and so are the edges; the last edge is above all values.
        """
        low, high = min(values), max(values)
        wanted = min(max(math.ceil(2 * math.sqrt(len(values))), BARS[0]), BARS[1])
        width = _round_up((high - low + whole) / wanted)
        if whole:
            width = max(1, math.ceil(width))
        first = math.floor(low / width) * width
        bars = max(1, math.floor((high - first) / width) + 1 if whole else math.ceil((high - first) / width - 1e-9))
        edges = tuple(first + index * width for index in range(bars + 1))
        return cls.between(values, edges)

    @classmethod
    def between(cls, values: Iterable[float], edges: Sequence[float]) -> "Histogram":
        """A histogram over given, evenly spaced edges, which hold all values."""
        width, counts = (edges[-1] - edges[0]) / (len(edges) - 1), [0] * (len(edges) - 1)
        for value in values:
            counts[min(int((value - edges[0]) / width + 1e-9), len(counts) - 1)] += 1
        return cls(tuple(edges), tuple(counts))


def _round_up(width: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    if width <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(width))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= width * (1 - 1e-9))


@dataclass(frozen=True)
class Distribution:
    """Numbers in short.

    Attributes:
        p90, p99: the smallest number that so many of a hundred do not exceed.
        limit: what they are held to, if anything.
    """

    count: int
    smallest: float
    largest: float
    mean: float
    median: float
    p90: float
    p99: float
    histogram: Histogram
    limit: int | None = None

    @classmethod
    def of(cls, values: Sequence[float], *, limit: int | None = None, edges: Sequence[float] = ()) -> "Distribution":
        """Of at least one number.

        Args:
            edges: of the histogram; by default round numbers.
        """
        ordered = sorted(values)
        n, whole = len(ordered), all(isinstance(value, int) for value in ordered)
        return cls(
            count=n,
            smallest=ordered[0],
            largest=ordered[-1],
            mean=sum(ordered) / n,
            median=(ordered[(n - 1) // 2] + ordered[n // 2]) / 2,
            p90=ordered[math.ceil(0.9 * n) - 1],
            p99=ordered[math.ceil(0.99 * n) - 1],
            histogram=Histogram.between(ordered, edges) if edges else Histogram.of(ordered, whole=whole),
            limit=limit,
        )


@dataclass
class Stops:
    """Whether what is learned ends in a stop token.

    Attributes:
        checked: sequences, or documents of packed rows, that ought to.
        stopped: those that do.
        others: numbers of the first rows with one that does not, from 1.
    """

    checked: int = 0
    stopped: int = 0
    others: list[int] = field(default_factory=list)


@dataclass
class Pairs:
    """The lengths of chosen and rejected answers, in tokens."""

    chosen: Distribution
    rejected: Distribution
    shorter_chosen: int
    equal: int
    longer_chosen: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> "Pairs":
        """Of the lengths of (chosen, rejected)."""
        chosen, rejected = ([pair[side] for pair in pairs] for side in (0, 1))
        shorter, equal = sum(a < b for a, b in pairs), sum(a == b for a, b in pairs)
        edges = Histogram.of([*chosen, *rejected], whole=True).edges
        both = Distribution.of(chosen, edges=edges), Distribution.of(rejected, edges=edges)
        return cls(*both, shorter, equal, len(pairs) - shorter - equal)

    @property
    def shorter_share(self) -> float:
        """Share of all pairs in which the shorter answer is the chosen one."""
        return self.shorter_chosen / self.chosen.count


@dataclass
class TokenFigures:
    """Figures on tokenised rows.

    Attributes:
        rows: rows in the data set; looked_at: those that the figures are of.
        lengths: distributions in tokens, by what is counted.
        tokens, supervised: of all rows looked at; of masked texts as the first epoch masks them.
        shares: the share of supervised tokens of each row, in tenths; None where rows have labels of another kind.
        documents: documents in the rows, where rows are packed, else 0.
        longest, shortest: numbers of rows, from 1; fullest: of the one with the most documents, where rows are packed.
        classes: (name, count), the most frequent first.
        values: the numbers to predict.
    """

    rows: int
    looked_at: int
    lengths: dict[str, Distribution]
    tokens: int
    supervised: int
    shares: Histogram | None
    stops: Stops
    documents: int
    longest: int
    shortest: int
    fullest: int | None = None
    pairs: Pairs | None = None
    classes: list[tuple[str, int]] = field(default_factory=list)
    values: Distribution | None = None


def token_figures(
    views: Iterable[tuple[int, RowView]], rows: int, *, stops: Collection[int], is_blank: Callable[[int], bool]
) -> TokenFigures:
    """Figures on the views of a data set.

    Args:
        views: (number, view) of the rows that are looked at, at least one; numbers count from 1.
        rows: of the whole data set.
        stops: ids at which generation stops.
        is_blank: whether an id may follow a stop token, as a line break that the template writes.
    """
    lengths: dict[str, list[int]] = {}
    limits: dict[str, int] = {}
    shares: list[float] = []
    totals: list[tuple[int, int]] = []  # (tokens, number of the row)
    counts, supervised, further, classes = Stops(), 0, Counter[int](), Counter[str]()
    values: list[float] = []
    pairs: list[tuple[int, int]] = []
    for number, view in views:
        for name, length in view.lengths.items():
            lengths.setdefault(name, []).append(length.tokens)
            limits[name] = length.limit
        sizes = [len(sequence.ids) for sequence in view.all_sequences]
        learned = sum(len(s.labels) - s.labels.count(IGNORE) for s in view.all_sequences)
        totals.append((sum(sizes), number))
        supervised += learned
        shares.append(learned / max(sum(sizes), 1))
        further[number] = max((len(sequence.starts) for sequence in view.all_sequences), default=0)
        _count_stops(counts, number, view, stops, is_blank)
        classes.update(view.classes)
        if view.value is not None:
            values.append(view.value)
        if [side.name for side in view.beside] == ["chosen", "rejected"]:
            pairs.append((len(view.beside[0].ids), len(view.beside[1].ids)))
    tenths = [tenth / 10 for tenth in range(11)]
    return TokenFigures(
        rows=rows,
        looked_at=len(totals),
        lengths={name: Distribution.of(found, limit=limits[name]) for name, found in lengths.items()},
        tokens=sum(size for size, _ in totals),
        supervised=supervised,
        shares=Histogram.between(shares, tenths) if supervised else None,
        stops=counts,
        documents=further.total() + len(totals) if further.total() else 0,
        longest=max(totals, key=lambda total: (total[0], -total[1]))[1],
        shortest=min(totals)[1],
        fullest=further.most_common(1)[0][0] if further.total() else None,
        pairs=Pairs.of(pairs) if pairs else None,
        classes=classes.most_common(),
        values=Distribution.of(values) if values else None,
    )


def _count_stops(
    counts: Stops, number: int, view: RowView, stops: Collection[int], is_blank: Callable[[int], bool]
) -> None:
    found = [end for s in view.all_sequences if s.ends for end in _ends(s, stops, is_blank)]
    counts.checked += len(found)
    counts.stopped += sum(found)
    if not all(found) and len(counts.others) < EXAMPLES:
        counts.others.append(number)


def _ends(sequence: TokenSequence, stops: Collection[int], is_blank: Callable[[int], bool]) -> Iterable[bool]:
    """Of each document in which something is learned, whether that ends in a stop token."""
    for start, end in sequence.documents:
        labels = [label for label in sequence.labels[start:end] if label != IGNORE]
        last = next((label for label in reversed(labels) if label in stops or not is_blank(label)), None)
        if last is not None:
            yield last in stops


# Rows as they were read


@dataclass
class Repeats:
    """Rows that occur twice or share a prompt; rows are numbered from 1, those held out by themselves.

    Attributes:
        looked_at: training rows that were compared, the first ones.
        repeated: training rows beyond the first of each kind that are equal to another in all that is used.
        repeated_examples: numbers of equal rows.
        conflicting: training rows that share a prompt with one that has another answer.
        conflicting_examples: numbers of rows with one prompt.
        held_out_rows: held-out rows that are training rows too; examples are (held-out row, training row).
        held_out_prompts: held-out rows, those among them, whose prompt is trained on.
    """

    looked_at: int = 0
    repeated: int = 0
    repeated_examples: list[list[int]] = field(default_factory=list)
    conflicting: int = 0
    conflicting_examples: list[list[int]] = field(default_factory=list)
    held_out_rows: int = 0
    held_out_examples: list[tuple[int, int]] = field(default_factory=list)
    held_out_prompts: int = 0
    held_out_prompt_examples: list[tuple[int, int]] = field(default_factory=list)

    @property
    def named(self) -> tuple[set[int], set[int]]:
        """The numbers of the training and of the held-out rows among the examples."""
        across = [*self.held_out_examples, *self.held_out_prompt_examples]
        within = {row for rows in (*self.repeated_examples, *self.conflicting_examples) for row in rows}
        return within | {row for _, row in across}, {row for row, _ in across}


def repeats(train: Iterable[Row], held_out: Iterable[Row]) -> Repeats:
    """Which rows are equal, and which prompts have several answers or are on both sides.

    Each side is gone through once, so that rows may be read as they are asked for.
    """
    found = Repeats()
    whole: dict[bytes, list[int]] = {}
    asked: dict[bytes, list[int]] = {}
    texts: set[bytes] = set()  # prompts that are all of their row, so that nothing is an answer to them
    for number, row in enumerate(train, 1):
        prompt = _prompt(row)
        whole.setdefault(fingerprint(row), []).append(number)
        asked.setdefault(prompt, []).append(number)
        if row.keys() == {"text"}:
            texts.add(prompt)
        found.looked_at = number
    groups = [places for places in whole.values() if len(places) > 1]
    found.repeated = sum(len(places) - 1 for places in groups)
    found.repeated_examples = [places[:EXAMPLES] for places in groups[:EXAMPLES]]
    firsts = {places[0] for places in whole.values()}
    differing = []
    for prompt, places in asked.items():
        distinct = [place for place in places if place in firsts]
        if len(distinct) > 1 and prompt not in texts:
            differing.append((len(places), distinct))
    found.conflicting = sum(count for count, _ in differing)
    found.conflicting_examples = [places[:EXAMPLES] for _, places in differing[:EXAMPLES]]
    for number, row in enumerate(held_out, 1):
        if same := whole.get(fingerprint(row)):
            found.held_out_rows += 1
            found.held_out_examples.append((number, same[0]))
        if near := asked.get(_prompt(row)):
            found.held_out_prompts += 1
            found.held_out_prompt_examples.append((number, near[0]))
    del found.held_out_examples[EXAMPLES:], found.held_out_prompt_examples[EXAMPLES:]
    return found


def fingerprint(row: Row) -> bytes:
    """Equal for rows that are equal."""
    text = json.dumps(row, sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _prompt(row: Row) -> bytes:
    return blake2b(prompt_key(row).encode("utf-8", "surrogatepass"), digest_size=16).digest()
