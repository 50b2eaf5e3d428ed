"""A ladder's figures for people: a table in the terminal, Markdown, and a picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..planning.units import count
from ..scoring.meter import counted
from .measure import Estimate, Figures
from .rungs import PROMPT, WRITTEN

if TYPE_CHECKING:
    from rich.console import Console

HEAD = (
    "rung",
    "changes",
    "parameters",
    "loss (95 %)",
    "perplexity",
    "gain (95 %)",
    "training",
    "decoding",
    "cache",
)


def rows_of(figures: Sequence[Figures]) -> list[tuple[str, ...]]:
    """One row a rung, in the order of `HEAD`."""
    before = None
    rows: list[tuple[str, ...]] = []
    for rung in figures:
        aside = "" if rung.parent in (None, before) else f"{rung.parent}: "
        rows.append(
            (
                rung.name,
                aside + changes(rung),
                parameters(rung),
                estimate(rung.loss),
                f"{rung.perplexity:.2f}",
                "–" if rung.gain is None else estimate(rung.gain, "+"),
                f"{rung.train.tokens:,.0f} ({rung.train.ratio:.2f}x)",
                f"{rung.decode.tokens:,.0f} ({rung.decode.ratio:.2f}x)",
                f"{rung.cache_token:,}",
            )
        )
        before = rung.name
    return rows


def parameters(rung: Figures) -> str:
    """All, and those that are active where a token does not use all."""
    return count(rung.parameters) + (f", {count(rung.active)} active" if rung.active < rung.parameters else "")


def changes(rung: Figures) -> str:
    """What a rung changes of its parent; of the first, that it is the first."""
    if rung.parent is None:
        return "the first"
    return ", ".join(f"{key} {_value(before)} → {_value(now)}" for key, (before, now) in rung.changes.items())


def estimate(figure: Estimate, sign: str = "") -> str:
    """A figure with both ends of its interval, of which one row says nothing."""
    inside = "unknown" if math.isnan(figure.low) else f"{figure.low:.4f} to {figure.high:.4f}"
    return f"{figure.value:{sign}.4f} ({inside})"


def _value(value: Any) -> str:
    return "–" if value is None else str(value)


def legend(rows: int) -> str:
    """What the columns mean."""
    return (
        f"Loss in nats a token over {counted(rows, 'held-out row')}; intervals are drawn over rows and say nothing of "
        "other seeds. Gain: the loss of the rung that it changes (the one above, or the one that is named) less its "
        "own. Training: tokens a second forward and backward; decoding: tokens a second of one text, "
        f"{WRITTEN} behind {PROMPT}; both with the ratio to the first rung, taken in turns. Cache: bytes a token in "
        "fp32."
    )


def show_table(console: "Console", figures: Sequence[Figures], rows: int) -> None:
    """In 80 columns: ratios instead of speeds, and half of an interval's width behind the sign of plus or minus."""
    from rich.markup import escape
    from rich.table import Column, Table

    names = ("params", "loss", "perpl.", "gain", "train", "decode", "cache")
    columns = [Column(name, justify="right", no_wrap=True) for name in names]
    table = Table(Column("rung"), *columns, box=None, padding=(0, 2, 0, 0))
    for rung in figures:
        gain = "–" if rung.gain is None else f"{rung.gain.value:+.3f}"
        if rung.gain is not None and not math.isnan(rung.gain.low):
            gain += f" ±{(rung.gain.high - rung.gain.low) / 2:.3f}"
        ratios = (f"{speed.ratio:.2f}x" for speed in (rung.train, rung.decode))
        cells = (count(rung.parameters), f"{rung.loss.value:.3f}", f"{rung.perplexity:.1f}", gain, *ratios)
        table.add_row(escape(rung.name), *cells, f"{rung.cache_token:,}")
    console.print(table)
    console.print(legend(rows), markup=False)


def markdown(name: str, figures: Sequence[Figures], rows: int, about: str, picture: str) -> str:
    """The ladder as a document."""
    from ..pipeline_report import markdown_table

    each = "\n".join(f"- **{rung.name}**: {rung.about}" for rung in figures)
    parts = (f"# {name}\n", f"{about}\n", markdown_table(HEAD, rows_of(figures)), f"{legend(rows)}\n")
    return "\n".join((*parts, f"![loss, speeds and cache of each rung]({picture})\n", f"{each}\n"))


def draw(figures: Sequence[Figures], path: Path) -> None:
    """Loss with its interval, speeds to the first rung's and cache bytes, one row a rung, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    height = 0.36 * len(figures) + 1.2
    canvas, panels = plt.subplots(1, 4, figsize=(12, height), sharey=True, layout="constrained")
    places = range(len(figures))
    losses = [(rung.loss.low, rung.loss.value, rung.loss.high) for rung in figures]
    low, middle, high = (np.array(values) for values in zip(*losses, strict=True))
    reach = np.maximum(np.nan_to_num([middle - low, high - middle]), 0)
    panels[0].errorbar(middle, places, xerr=reach, fmt="o", markersize=4, linewidth=1)
    panels[0].set_xlabel("held-out loss (nats a token)")
    bars = (
        ("training, to the first", [rung.train.ratio for rung in figures]),
        ("decoding, to the first", [rung.decode.ratio for rung in figures]),
        ("cache (bytes a token, fp32)", [rung.cache_token for rung in figures]),
    )
    for axes, (label, values) in zip(panels[1:], bars, strict=True):
        axes.barh(places, values, height=0.6)
        axes.set_xlabel(label)
    panels[0].set_yticks(places, [rung.name for rung in figures])
    panels[0].invert_yaxis()
    for axes in panels:
        axes.grid(alpha=0.3, axis="x")
    canvas.savefig(path)
    plt.close(canvas)
