"""The diagram as one SVG file that asks for nothing, in light and dark."""

from collections.abc import Iterator, Sequence
from html import escape

from .structure import Box, Column, Diagram, Group, Item, Layer, Sum
from .text import cells, wrapped

# Sizes in pixels. Letters are of one width, so that a box is known to be wide enough before anybody draws it: of the
# families named, none is wider than 0.61 of its size.
FONT, LETTER, LINE = 13, 0.61 * 13, 18
PAD, GAP, STEM = 10, 14, 40
MARGIN, FRAME = 24, 12
FAMILIES = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
LIGHT = {
    "page": "#ffffff",
    "text": "#1b1f24",
    "soft": "#57606a",
    "line": "#57606a",
    "frame": "#b6bec8",
    "embedding": "#fbe9c6",
    "attention": "#d8e6fb",
    "cross": "#e6dcfa",
    "mlp": "#d5f0dc",
    "head": "#fadcdc",
    "norm": "#eceff3",
    "other": "#f3e3ef",
}
DARK = {
    "page": "#14171c",
    "text": "#e8ebef",
    "soft": "#a5aeb9",
    "line": "#98a2ae",
    "frame": "#4a535f",
    "embedding": "#4d3d17",
    "attention": "#1e3a61",
    "cross": "#3b2c63",
    "mlp": "#1d4a2c",
    "head": "#5a2628",
    "norm": "#2b313a",
    "other": "#4b2a43",
}


class Drawing:
    """Shapes as they come, and how far down they reach.

    Attributes:
        crossings: middle of the left edge of each cross-attention.
    """

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.crossings: list[tuple[float, float]] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.shapes.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6"/>'
        )

    def word(self, x: float, y: float, text: str, kind: str = "") -> None:
        mark = f' class="{kind}"' if kind else ""
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}"{mark}>{escape(text)}</text>')

    def path(self, points: Sequence[tuple[float, float]], *, kind: str = "way", arrow: bool = False) -> None:
        way = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        end = ' marker-end="url(#tip)"' if arrow else ""
        self.shapes.append(f'<path class="{kind}" d="M{way}"{end}/>')

    def plus(self, x: float, y: float) -> None:
        self.shapes.append(f'<circle class="sum" cx="{x:.1f}" cy="{y:.1f}" r="7"/>')
        self.path([(x - 4, y), (x + 4, y)])
        self.path([(x, y - 4), (x, y + 4)])


def as_svg(diagram: Diagram, rows: Sequence[tuple[str, str, str]]) -> str:
    """The diagram, with facts above it and the table of parameters below.

    Args:
        rows: of the table, see `parameters.table`.
    """
    drawing = Drawing()
    y = MARGIN + 20.0
    drawing.word(MARGIN, y, diagram.name, "title")
    facts = [f"{name}: {value}" for name, value in diagram.facts]
    for line in facts:
        y += LINE
        drawing.word(MARGIN, y, line, "soft")
    top, x, bottom = y + 30, float(MARGIN), 0.0
    ends = []
    for column in diagram.columns:
        wide = _column_width(column)
        end = _draw_column(drawing, column, x, top, wide, many=len(diagram.columns) > 1)
        ends.append((x, end, wide))
        bottom, x = max(bottom, end), x + wide + 50
    if len(ends) == 2:
        _cross(drawing, diagram.columns[0], ends)
    width = max(x - 50, MARGIN + LETTER * max(*map(cells, facts), cells(diagram.name) * 16 / FONT))
    y = bottom + 20
    for name, number, share in rows:
        y += LINE
        drawing.word(MARGIN, y, name)
        drawing.shapes.append(f'<text class="right" x="{MARGIN + 34 * LETTER:.1f}" y="{y:.1f}">{escape(number)}</text>')
        drawing.shapes.append(f'<text class="right" x="{MARGIN + 44 * LETTER:.1f}" y="{y:.1f}">{escape(share)}</text>')
    return _document(drawing, diagram.name, max(width, MARGIN + 44 * LETTER) + MARGIN, y + MARGIN)


def _document(drawing: Drawing, name: str, width: float, height: float) -> str:
    inside = "\n".join(drawing.shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}">\n<title>{escape(name)}</title>\n<style>\n{_style()}\n</style>\n'
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0 L10 5 L0 10 z"/></marker></defs>\n'
        f'<rect class="page" x="0" y="0" width="{width:.0f}" height="{height:.0f}"/>\n{inside}\n</svg>\n'
    )


def _style() -> str:
    def rules(colours: dict[str, str]) -> Iterator[str]:
        for kind in ("page", "embedding", "attention", "cross", "mlp", "head", "norm", "other"):
            yield f".{kind} {{ fill: {colours[kind]}; }}"
        yield f"text {{ fill: {colours['text']}; }} .soft {{ fill: {colours['soft']}; }}"
        yield f".way, .cross-way {{ stroke: {colours['line']}; }} .tip {{ fill: {colours['line']}; }}"
        yield f".sum {{ fill: {colours['page']}; stroke: {colours['line']}; }}"
        yield f".group {{ stroke: {colours['frame']}; }}"

    fixed = [
        f"text {{ font: {FONT}px {FAMILIES}; white-space: pre; }}",
        "text.title { font-size: 16px; font-weight: bold; } text.strong { font-weight: bold; }",
        "text.right { text-anchor: end; }",
        ".way, .cross-way, .group { fill: none; stroke-width: 1.5; } .cross-way { stroke-dasharray: 5 4; }",
    ]
    dark = " ".join(rules(DARK))
    return "\n".join([*fixed, *rules(LIGHT), f"@media (prefers-color-scheme: dark) {{ {dark} }}"])


# Where things stand.


def _depth(parts: Sequence[Layer | Group]) -> int:
    return max((1 + _depth(part.parts) for part in parts if isinstance(part, Group)), default=0)


def _boxes(parts: Sequence[Layer | Group | Item]) -> Iterator[tuple[Box, int]]:
    """All boxes, and how many stems they stand away from the stream."""
    for part in parts:
        if isinstance(part, Box):
            yield part, 0
        elif isinstance(part, Sum):
            yield from ((box, 1) for box in part.shared)
            yield from ((box, 2 if part.shared else 1) for branch in part.branches for box in branch)
        else:
            yield from _boxes(part.items if isinstance(part, Layer) else part.parts)


def _box_width(box: Box) -> float:
    return max(map(cells, wrapped(box))) * LETTER + 2 * PAD


def _column_width(column: Column) -> float:
    inner = max(
        _box_width(box) + stems * STEM for box, stems in _boxes([*column.before, *column.groups, *column.after])
    )
    rail = 24 if any(len(item.branches) > 1 for item in _sums(column.groups)) else 0
    return inner + rail + 2 * FRAME * _depth(column.groups) + 3 * PAD


def _sums(parts: Sequence[Layer | Group]) -> Iterator[Sum]:
    for part in parts:
        if isinstance(part, Group):
            yield from _sums(part.parts)
        else:
            yield from (item for item in part.items if isinstance(item, Sum))


def _draw_column(drawing: Drawing, column: Column, x: float, y: float, width: float, *, many: bool) -> float:
    """Draw a column; how far down it reaches."""
    if many:
        drawing.word(x, y, column.title, "strong")
        y += LINE
    stream = x + FRAME * _depth(column.groups) + PAD
    drawing.word(x, y, column.source, "soft")
    y += 8
    top, begin = y, len(drawing.shapes)
    for box in column.before:
        y = _draw_item(drawing, box, stream, y)
    for group in column.groups:
        y = _draw_group(drawing, group, x, stream, y + GAP, width)
    for box in column.after:
        y = _draw_item(drawing, box, stream, y)
    y += 22
    # The stream lies behind everything.
    shapes, drawing.shapes = drawing.shapes[begin:], drawing.shapes[:begin]
    drawing.path([(stream, top), (stream, y)], arrow=True)
    drawing.shapes += shapes
    drawing.word(stream + 12, y, column.result, "soft")
    return y


def _draw_group(drawing: Drawing, group: Group, x: float, stream: float, y: float, width: float) -> float:
    top = y
    drawing.word(stream + 12, y + 17, group.label, "strong")
    y += 22
    for part in group.parts:
        if isinstance(part, Group):
            y = _draw_group(drawing, part, x + FRAME, stream, y + GAP / 2, width - 2 * FRAME)
        else:
            for item in part.items:
                y = _draw_item(drawing, item, stream, y)
    y += GAP
    drawing.rect(x, top, width, y - top, "group")
    return y


def _draw_item(drawing: Drawing, item: Item, stream: float, y: float) -> float:
    if isinstance(item, Box):
        return _draw_box(drawing, item, stream - PAD, y + GAP)
    start, left = y + GAP, stream + STEM
    y = start
    for box in item.shared:
        drawing.path([(stream, y + GAP + LINE / 2 + 4), (left - 1, y + GAP + LINE / 2 + 4)], arrow=True)
        y = _draw_box(drawing, box, left, y + GAP)
    split = y
    inner = left + STEM if item.shared else left
    rail = inner + max(_box_width(box) for branch in item.branches for box in branch) + 14
    outs = []
    for branch in item.branches:
        middle = y + GAP + LINE / 2 + 4
        begin = [(left + 16, split), (left + 16, middle)] if item.shared else [(stream, middle)]
        drawing.path([*begin, (inner - 1, middle)], arrow=True)
        for nth, box in enumerate(branch):
            if nth:
                drawing.path([(inner + 16, y), (inner + 16, y + GAP - 1)], arrow=True)
            out = y + GAP + LINE / 2 + 4
            y = _draw_box(drawing, box, inner, y + GAP)
        outs.append((inner + _box_width(branch[-1]), out))
    end = y + GAP + 2
    if len(outs) == 1:
        drawing.path([(inner + 16, y), (inner + 16, end), (stream + 9, end)], arrow=True)
    else:  # they come together on the right, since both read the stream as it was
        for x, out in outs[1:]:
            drawing.path([(x, out), (rail, out)])
        drawing.path([outs[0], (rail, outs[0][1]), (rail, end), (stream + 9, end)], arrow=True)
    if item.note:
        drawing.word(inner + 28, end + LINE, item.note, "soft")
    drawing.plus(stream, end)
    return end + (LINE if item.note else 8)


def _draw_box(drawing: Drawing, box: Box, x: float, y: float) -> float:
    lines = wrapped(box)
    height = len(lines) * LINE + 8
    if box.kind == "cross":
        drawing.crossings.append((x, y + height - 10))
    drawing.rect(x, y, _box_width(box), height, box.kind)
    for nth, line in enumerate(lines):
        plain = nth > 0 or box.kind == "norm"
        indent = (len(line) - len(line.lstrip())) * LETTER
        drawing.word(x + PAD + indent, y + LINE * (nth + 1) - 1, line.lstrip(), "" if plain else "strong")
    return y + height


def _cross(drawing: Drawing, encoder: Column, ends: Sequence[tuple[float, float, float]]) -> None:
    """From the encoder's end to every cross-attention, through the gap between the columns.

    Args:
        ends: left edge, end and width of each column.
    """
    (x, y, wide), (decoder, _, _) = ends
    words = x + FRAME * _depth(encoder.groups) + PAD + 12 + cells(encoder.result) * LETTER
    gutter = (x + wide + decoder) / 2
    for left, height in drawing.crossings:
        ways = [(words + 8, y - 4), (gutter, y - 4), (gutter, height), (left - 1, height)]
        drawing.path(ways, kind="cross-way", arrow=True)
