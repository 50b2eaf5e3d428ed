"""`anyformer compare`: runs side by side."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN...",
            help="Folders of runs (their train.output_dir); a pipeline's folder stands for the runs of its stages.",
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page too, in one file that needs no network.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, without prompts and answers, and nothing else.")
    ] = False,
) -> None:
    """Show what differs between runs: recipes, held-out figures with intervals, curves, sample answers.

    For example: anyformer compare runs/quickstart runs/again --html compare.html
    """
    from ..recipes.comparison.show import show_comparison

    show_comparison(runs, html=html, as_json=as_json)
