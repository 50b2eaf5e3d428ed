"""`anyformer merge`: an adapter and its base become one model."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A folder or Hub id that holds an adapter.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write; it must not exist.")],
    base: Annotated[
        str | None, typer.Option(help="The model that the adapter belongs to; default: the one it names.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the repositories.")
    ] = False,
) -> None:
    """Add an adapter's change to its base's weights, and write one plain model."""
    from ..recipes.conversion import merge_adapter

    for line in merge_adapter(adapter, target, base=base, trust_remote_code=trust_remote_code):
        typer.echo(line)
