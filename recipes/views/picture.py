"""Attention maps as a picture: a row of maps for each layer, a column for each head."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .chosen import Chosen
from .maps import Maps
from .show import write

# Inches of a token, of the smallest map, and of the labels beside and below.
_TOKEN, _SMALLEST, _LABELS, _GAP = 0.13, 0.9, 0.95, 0.12
_LONGEST_LABEL, _SIZE = 14, 7


def draw(maps: Sequence[Maps], chosen: Chosen, name: str, file: Path) -> None:
    """Write the picture, SVG or PNG by the file's end; several kinds stand below each other.

    Raises:
        UserError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    maps = [each for each in maps if min(chosen.layers) < len(each.weights)]
    rows = [[layer for layer in chosen.layers if layer < len(each.weights)] for each in maps]
    sizes = [(_side(each.keys), _side(each.queries)) for each in maps]
    wide = max(len(chosen.heads) * (width + _GAP) for width, _ in sizes) + _LABELS + 0.3
    heights = [len(layers) * (height + _GAP) + _LABELS + 0.55 for layers, (_, height) in zip(rows, sizes, strict=True)]
    settings: Any = {"svg.fonttype": "none", "font.family": ["DejaVu Sans Mono"], "svg.hashsalt": "anyformer"}
    with plt.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = plt.figure(figsize=(wide, sum(heights) + 0.4), facecolor="white")
        figure.text(0.1 / wide, 1 - 0.25 / figure.get_figheight(), name, fontsize=10, weight="bold", parse_math=False)
        top = figure.get_figheight() - 0.4
        for each, layers, size, height in zip(maps, rows, sizes, heights, strict=True):
            _kind(figure, each, layers, chosen.heads, size, top)
            top -= height
        drawn = io.BytesIO()
        metadata: dict[str, Any] = {"Date": None} if file.suffix.lower() == ".svg" else {}
        figure.savefig(drawn, format=file.suffix.lower()[1:], dpi=120, metadata=metadata)
        plt.close(figure)
    write(file, drawn.getvalue(), "--attention")


def _side(tokens: Sequence[str]) -> float:
    return max(_TOKEN * len(tokens), _SMALLEST)


def _kind(
    figure: Any, maps: Maps, layers: Sequence[int], heads: Sequence[int], size: tuple[float, float], top: float
) -> None:
    """The maps of one kind, from `top` inches above the bottom downwards."""
    wide, high = figure.get_figwidth(), figure.get_figheight()
    width, height = size
    title = f"{maps.title}: rows look at columns; dark is 1, white is 0"
    figure.text(0.1 / wide, (top - 0.2) / high, title, fontsize=9, parse_math=False)
    for row, layer in enumerate(layers):
        below = top - 0.5 - row * (height + _GAP) - height
        for column, head in enumerate(heads):
            left = _LABELS + column * (width + _GAP)
            axes = figure.add_axes((left / wide, below / high, width / wide, height / high))
            weights = maps.weights[layer][head].cpu().numpy()
            axes.imshow(weights, vmin=0, vmax=1, cmap="Blues", aspect="auto", interpolation="nearest")
            if row == 0:
                axes.set_title(f"head {head}", fontsize=_SIZE, pad=2)
            axes.tick_params(length=0, pad=1.5, labelsize=_SIZE)
            _label(axes.yaxis, maps.queries if column == 0 else ())
            _label(axes.xaxis, maps.keys if row == len(layers) - 1 else (), rotation=90)
            if column == len(heads) - 1:
                axes.yaxis.set_label_position("right")
                axes.set_ylabel(f"layer {layer}", fontsize=_SIZE, labelpad=2)


def _label(axis: Any, tokens: Sequence[str], rotation: int = 0) -> None:
    axis.set_ticks(range(len(tokens)))
    short = [token if len(token) <= _LONGEST_LABEL else f"{token[: _LONGEST_LABEL - 1]}…" for token in tokens]
    axis.set_ticklabels(short, rotation=rotation)
    for label in axis.get_ticklabels():
        label.set_parse_math(False)
