"""Losses of runs by step over each other, as SVG that takes its colours from the page around it."""

import io
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .folders import Run

# Colours of the page that stand for colours of matplotlib, which knows no variables.
_TEXT, _RULE = "#010203", "#010204"
# As many runs have a colour of their own; more begin anew, with another dash.
COLOURS = 6
_DASHES = ("-", "--", ":", "-.")
# In points, of a picture that is 352 wide: it is shown at that width on a telephone.
_SIZE, _FONT = (352 / 72, 232 / 72), 11.5

Points = list[tuple[float, float]]


class Curves(NamedTuple):
    """A picture.

    Attributes:
        runs: places of the runs that are in it.
        svg: markup without a name of a run in it.
    """

    title: str
    caption: str
    runs: list[int]
    svg: str


def draw(runs: Sequence[Run]) -> list[Curves]:
    """Training loss, held-out loss and what else runs were seen to log, as far as a run has it."""
    pictures = []
    for title, caption, found, mark in (
        ("Training loss", "mean of the steps since the last log", [_logged(run, "loss") for run in runs], ""),
        ("Held-out loss", "before, during and after training", [held_out(run) for run in runs], "o"),
        ("Reward", "of the answers in training", [_logged(run, "reward") for run in runs], ""),
    ):
        shown = [number for number, points in enumerate(found) if points]
        if shown:
            pictures.append(Curves(title, f"{caption}, by step", shown, _svg(title, found, mark)))
    return pictures


def held_out(run: Run) -> Points:
    """(step, held-out loss) before, during and after training."""
    points = _logged(run, "eval_loss")
    last = max((entry["step"] for entry in run.history if "step" in entry), default=1)
    before, after = (run.figures(when).get("loss") for when in ("before", "after"))
    start = [] if before is None else [(0.0, before)]
    return (
        start
        + [point for point in points if after is None or point[0] < last]
        + ([] if after is None else [(last, after)])
    )


def _logged(run: Run, name: str) -> Points:
    return [
        (entry["step"], entry[name])
        for entry in run.history
        if "step" in entry and isinstance(entry.get(name), int | float) and math.isfinite(entry[name])
    ]


def _svg(title: str, found: Sequence[Points], mark: str) -> str:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": _FONT, "axes.unicode_minus": False}
    with matplotlib.rc_context(settings | dict.fromkeys(("text.color", "xtick.color", "ytick.color"), _TEXT)):
        figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
        for number, points in enumerate(found):
            if points:
                dash = _DASHES[number // COLOURS % len(_DASHES)]
                colour, marker = _placeholder(number % COLOURS), mark or ("o" if len(points) == 1 else "")
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, ls=dash, lw=1.8)
        axes.set_xlabel("step", color=_TEXT)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        axes.grid(color=_RULE, linewidth=1)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_RULE)
        axes.tick_params(length=0)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    text = file.getvalue()
    return _themed(text[text.index("<svg") :]).replace("<svg ", f'<svg role="img" aria-label="{title} by step" ', 1)


def _placeholder(number: int) -> str:
    return f"#01020{5 + number:x}"


def _themed(svg: str) -> str:
    """With the page's colours, and without what pictures on one page may not both have: the names of groups."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for number in range(COLOURS):
        svg = svg.replace(_placeholder(number), f"var(--run{number})")
    return svg.replace(_TEXT, "var(--text)").replace(_RULE, "var(--rule)")
