"""`anyformer list`: what is shipped."""

import typer


def command() -> None:
    """List the shipped recipes and architecture presets."""
    from ..recipes.loading import describe, shipped

    for title, folder in (("Recipes (anyformer train NAME)", "recipes"), ("Presets (model.preset: NAME)", "models")):
        files = shipped(folder)
        width = max(map(len, files), default=0)
        typer.echo(f"{title}:")
        for name, file in files.items():
            typer.echo(f"  {name:<{width}}  {describe(file)}".rstrip())
        if not files:
            typer.echo("  none")
