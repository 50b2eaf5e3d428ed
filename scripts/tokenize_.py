"""`anyformer tokenize`: texts become token shards for pretraining."""

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer


class _Progress:
    """A line on the terminal that is written anew, at most once a second."""

    def __init__(self) -> None:
        self.started = self.shown = time.monotonic()

    def __call__(self, documents: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self.shown >= 1:
            self.shown = now
            rate = tokens / (now - self.started)
            typer.echo(f"\r{documents:,} documents, {tokens:,} tokens, {rate:,.0f} a second ", err=True, nl=False)


def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... OUT",
            help="Files, globs or built-in data sets of texts, and the folder to write. With --verify and no source: "
            "the folder to check.",
        ),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder, a Hub id, package:<import_package>/<file>, or builtin:bytes.")
    ] = None,
    column: Annotated[str, typer.Option(help="Where rows keep their text.")] = "text",
    on_bad_row: Annotated[
        Literal["error", "skip"], typer.Option(help="What becomes of rows that cannot be used.")
    ] = "error",
    shard_tokens: Annotated[int, typer.Option(min=1, help="About the size of a shard.")] = 2**27,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one a core. 1: threads of this one.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare what is in the folder with its checksums.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder of token shards.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the tokenizer's repository.")
    ] = False,
) -> None:
    """Tokenise texts once, into a folder that pretraining reads from disk."""
    from ..recipes.errors import UserError
    from ..recipes.shards.build import tokenize_sources, verified

    *sources, target = paths
    if not sources:
        if not verify:
            raise UserError("name the texts and then the folder to write: anyformer tokenize SOURCE... OUT")
        typer.echo(verified(Path(target)))
        return
    if tokenizer is None:
        raise UserError("--tokenizer is missing: name the tokenizer of the model that is to be trained")
    lines = tokenize_sources(
        sources,
        Path(target),
        tokenizer,
        trust_remote_code=trust_remote_code,
        verify=verify,
        column=column,
        skip=on_bad_row == "skip",
        shard_tokens=shard_tokens,
        workers=workers,
        overwrite=overwrite,
        progress=_Progress() if sys.stderr.isatty() else None,
    )
    for line in lines:
        typer.echo(line)
