"""`anyformer export`: an anyformer folder becomes a checkpoint of the stock class."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="An anyformer folder, a run, or a Hub id.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write; it must not exist.")],
    model_type: Annotated[
        str | None, typer.Option(help="The family to export to; default: the first that can express the model.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare logits with the exported model.")] = True,
) -> None:
    """Export to the stock class of a family: config, weights and tokenizer, bit for bit."""
    from ..recipes.conversion import export_checkpoint

    for line in export_checkpoint(source, target, model_type=model_type, verify=verify):
        typer.echo(line)
