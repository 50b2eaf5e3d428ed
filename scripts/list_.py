"""`anyformer list`: what is shipped."""

from collections.abc import Mapping

import typer


def command() -> None:
    """List the shipped recipes, pipelines of recipes and architecture presets."""
    from ..recipes.loading import describe, shipped, shipped_pipelines, stage_files

    recipes, presets = (
        {name: describe(file) for name, file in shipped(folder).items()} for folder in ("recipes", "models")
    )
    # What the first stage's file says first is said of the whole.
    pipelines = {name: describe(stage_files(folder)[0]) for name, folder in shipped_pipelines().items()}
    _show("Recipes (anyformer train NAME)", recipes)
    if pipelines:
        _show("Pipelines, several recipes in one command (anyformer train NAME)", pipelines)
    _show("Presets (model.preset: NAME)", presets)


def _show(title: str, entries: Mapping[str, str]) -> None:
    width = max(map(len, entries), default=0)
    typer.echo(f"{title}:")
    for name, text in entries.items():
        typer.echo(f"  {name:<{width}}  {text}".rstrip())
    if not entries:
        typer.echo("  none")
