"""Which layers and heads a picture shows."""

import re
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

# Maps of one kind in a picture, and the layers and heads that are shown of a model that has more.
MOST_MAPS, SIDE = 144, 8


@dataclass(frozen=True)
class Chosen:
    """Numbers from 0.

    Attributes:
        of: how many there are, in words.
        partial: some are left out that nobody asked to leave out.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    of: str
    partial: bool


def choose(config: Any, layers: str | None, heads: str | None) -> Chosen:
    """The layers and heads of a picture: those that are asked for; all, or some spread evenly where they are too many.

    Args:
        layers, heads: as `0-3,11`.

    Raises:
        UserError: no such layer or head, or too many for one picture.
    """
    depth, width = config.num_hidden_layers, config.num_attention_heads
    if config.architecture == "encoder-decoder":
        depth = max(depth, config.num_encoder_layers)
    given = layers is not None, heads is not None
    rows = _numbers(layers, depth, "--layers", "layers") if layers is not None else tuple(range(depth))
    columns = _numbers(heads, width, "--heads", "heads") if heads is not None else tuple(range(width))
    if len(rows) * len(columns) > MOST_MAPS:
        if all(given):
            raise UserError(
                f"--layers and --heads choose {len(rows)} x {len(columns)} maps: at most {MOST_MAPS} fit a picture"
            )
        rows = rows if given[0] else _spread(rows, max(min(SIDE, MOST_MAPS // len(columns)), 1) if given[1] else SIDE)
        columns = columns if given[1] else _spread(columns, max(min(SIDE, MOST_MAPS // len(rows)), 1))
        if len(rows) * len(columns) > MOST_MAPS:
            raise UserError(f"{len(rows)} x {len(columns)} maps are too many for a picture: at most {MOST_MAPS}")
    partial = (len(rows) < depth and not given[0]) or (len(columns) < width and not given[1])
    return Chosen(rows, columns, f"{depth} layers and {width} heads", partial)


def _spread(numbers: tuple[int, ...], most: int) -> tuple[int, ...]:
    """At most so many, the first and the last among them."""
    if len(numbers) <= most:
        return numbers
    last = len(numbers) - 1
    return tuple(numbers[round(i * last / max(most - 1, 1))] for i in range(most))


def _numbers(text: str, count: int, option: str, what: str) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        if match is None:
            raise UserError(f"{option}: {text!r} is no list of numbers such as 0-3,11")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UserError(f"{option}: {part.strip()} runs backwards: write {last}-{first}")
        if last >= count:
            raise UserError(f"{option}: {last} is out of range: the model has {count} {what}, 0 to {count - 1}")
        found |= dict.fromkeys(range(first, last + 1))
    return tuple(found)
