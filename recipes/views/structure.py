"""A model as boxes, sums and groups of equal layers: what the diagrams in text and SVG draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["embedding", "norm", "attention", "cross", "mlp", "head", "other"]


@dataclass(frozen=True)
class Box:
    """A part of the model, and what is said of it line by line."""

    kind: Kind
    title: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sum:
    """What a layer adds to the residual stream.

    Attributes:
        branches: each a way through boxes; where there are several, they stand side by side.
        shared: what all branches go through first.
        note: a factor on what is added.
    """

    branches: tuple[tuple[Box, ...], ...]
    shared: tuple[Box, ...] = ()
    note: str = ""


Item = Box | Sum


@dataclass(frozen=True)
class Layer:
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Group:
    """Consecutive layers: `parts` in their order, `times` over.

    Attributes:
        first: number of the first layer.
        length: layers in all.
    """

    first: int
    length: int
    times: int
    parts: "tuple[Layer | Group, ...]"

    @property
    def label(self) -> str:
        last = self.first + self.length - 1
        if self.length == 1:
            return f"layer {self.first}"
        if self.times == 1:
            return f"layers {self.first}–{last}"
        each = self.length // self.times
        return (
            f"layers {self.first}–{last}: × {self.times}"
            if each == 1
            else (f"layers {self.first}–{last}: these {each} in turn, × {self.times}")
        )


@dataclass(frozen=True)
class Column:
    """A stack: what is done to the tokens, the layers, what follows them.

    Attributes:
        source: what goes in; result: what comes out.
    """

    title: str
    source: str
    before: tuple[Box, ...]
    groups: tuple[Group, ...]
    after: tuple[Box, ...]
    result: str


@dataclass(frozen=True)
class Diagram:
    """The whole model; of an encoder-decoder the encoder's column stands first.

    Attributes:
        facts: of the whole, by name.
    """

    name: str
    columns: tuple[Column, ...]
    facts: tuple[tuple[str, str], ...]


def fold(layers: Sequence[Layer], first: int = 0) -> tuple[Group, ...]:
    """Runs of equal layers and patterns that return, as groups: of patterns that cover equally many, the shortest."""
    groups: list[Group] = []
    place = 0
    while place < len(layers):
        period, times = _best(layers[place:])
        length = period * times
        parts: tuple[Layer | Group, ...] = (layers[place],)
        if period > 1:
            parts = fold(layers[place : place + period], first + place)
        groups.append(Group(first + place, length, times, parts))
        place += length
    return tuple(groups)


def _best(layers: Sequence[Layer]) -> tuple[int, int]:
    """Length of the pattern that the layers begin with, and how often it comes."""
    best = (1, 1)
    for period in range(1, len(layers) // 2 + 1):
        times = 1
        while layers[times * period : (times + 1) * period] == layers[:period]:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best
