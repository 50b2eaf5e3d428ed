"""`anyformer data`: show what a recipe would train on."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A YAML file, a folder of stages, or a shipped name (see `anyformer list`)."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="OVERRIDES", help="Changes to the recipe, as `anyformer train` takes them."),
    ] = None,
    stage: Annotated[str | None, typer.Option("--stage", help="Of a folder of stages: whose data to show.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page too, in one file that needs no network.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="How many of the first rows to show.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, without a row's text, and nothing else.")
    ] = False,
) -> None:
    """Show what a recipe would train on, token by token, and what is odd about it; no weight is loaded.

    For example: anyformer data quickstart --html quickstart.html
    """
    from ..recipes.inspection.show import show_data

    show_data(recipe, overrides or (), stage=stage, html=html, rows=rows, as_json=as_json)
