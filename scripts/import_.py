"""`anyformer import`: a foreign checkpoint becomes an anyformer folder."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def command(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A folder, a .gguf file, a Hub id, or package:<import_package>/<file>."),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write; it must not exist.")],
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the weights; auto: as stored.")
    ] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare logits with the stock class.")] = True,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the source.")] = False,
) -> None:
    """Import a foreign checkpoint: config, weights, tokenizer; every key used or reported."""
    from ..recipes.conversion import import_checkpoint

    options: dict[str, Any] = {"dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
    for line in import_checkpoint(source, target, verify=verify, **options):
        typer.echo(line)
