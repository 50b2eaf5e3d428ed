"""The diagram in text, from top to bottom: the residual stream on the left, what is added to it on the right."""

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

from .structure import Box, Column, Diagram, Group, Item, Layer, Sum

# Characters of a line in a box, and of a column of the diagram.
WIDTH, COLUMN, GAP = 46, 62, 3


def as_text(diagram: Diagram, parameters: Sequence[str], width: int = 160) -> str:
    """The diagram with facts above and the table of parameters below.

    Args:
        width: of the terminal: two columns stand side by side where they fit.
    """
    head = [diagram.name, *_table(diagram.facts), ""]
    columns = [list(column_lines(column, many=len(diagram.columns) > 1)) for column in diagram.columns]
    drawn = columns[0]
    if len(columns) == 2 and width >= 2 * COLUMN + GAP:
        drawn = list(_side_by_side(*columns))
    elif len(columns) == 2:
        drawn = [*columns[0], "", *columns[1]]
    return "\n".join(line.rstrip() for line in (*head, *drawn, "", *parameters))


def _table(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    wide = max(len(name) for name, _ in facts)
    return (f"{name:>{wide}}  {value}" for name, value in facts)


def _side_by_side(left: list[str], right: list[str]) -> Iterator[str]:
    """The encoder ends where the decoder does."""
    longest = max(len(left), len(right))
    left, right = ([*lines, *[""] * (longest - len(lines))] for lines in (left, right))
    for one, other in zip(left, right, strict=True):
        yield one + " " * (COLUMN + GAP - cells(one)) + other


def column_lines(column: Column, *, many: bool = False) -> Iterator[str]:
    if many:
        yield column.title
    yield column.source
    yield " │"
    for box in column.before:
        yield from _item(box)
    for group in column.groups:
        yield from _group(group)
        yield " │"
    for box in column.after:
        yield from _item(box)
    yield f" ▼ {column.result}"


def _group(group: Group, wide: int = COLUMN - 2) -> Iterator[str]:
    yield f"╔═ {group.label} ".ljust(wide, "═")
    for part in group.parts:
        lines = _group(part, wide - 1) if isinstance(part, Group) else _layer(part)
        yield from (f"║{line}" for line in lines)
    yield "╚".ljust(wide, "═")


def _layer(layer: Layer) -> Iterator[str]:
    yield " │"
    for item in layer.items:
        yield from _item(item)


def _item(item: Item) -> Iterator[str]:
    if isinstance(item, Sum):
        yield from _sum(item)
        yield " │"
    elif item.kind == "norm":
        yield f" ▼ {item.title}"
        yield " │"
    else:
        yield from (f" {line}" for line in _framed(item))
        yield " │"


def _sum(item: Sum) -> Iterator[str]:
    stem = " "
    if item.shared:
        for box in item.shared:
            yield f" ├─▶ {box.title}"
        stem = " │   "
    for nth, branch in enumerate(item.branches):
        last = bool(item.shared) and nth == len(item.branches) - 1
        lines = [line for box in branch for line in ([box.title] if box.kind == "norm" else _framed(box))]
        for place, line in enumerate(lines):
            start = "├─▶ " if place == 0 and not last else "╰─▶ " if place == 0 else "    " if last else "│   "
            yield stem + start + line
    note = f" {item.note}" if item.note else ""
    yield f" ⊕◀──╯{note}"


def wrapped(box: Box, width: int = WIDTH) -> list[str]:
    """The lines of a box, the title first."""
    return [piece for line in (box.title, *box.lines) for piece in textwrap.wrap(line, width, subsequent_indent="  ")]


def _framed(box: Box) -> list[str]:
    inside = wrapped(box)
    wide = max(cells(line) for line in inside)
    rows = (f"│ {line}{' ' * (wide - cells(line))} │" for line in inside)
    return [f"┌{'─' * (wide + 2)}┐", *rows, f"└{'─' * (wide + 2)}┘"]


def cells(text: str) -> int:
    """Places that a text takes in a terminal, or in letters of one width."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)
