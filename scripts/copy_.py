"""`anyformer copy`: a shipped recipe or preset as a file to change."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A shipped recipe or preset (see `anyformer list`).")],
    target: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file or folder to write; default: here, by its name.")
    ] = None,
) -> None:
    """Copy a shipped recipe or preset, to be changed."""
    from ..recipes.loading import copy_shipped

    typer.echo(f"written to {copy_shipped(name, target or Path())}")
