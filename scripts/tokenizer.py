"""`anyformer tokenizer`: a tokenizer is trained on texts."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... OUT", help="Files, globs or built-in data sets of texts, and the folder to write."
        ),
    ],
    kind: Annotated[
        Literal["bpe", "unigram"], typer.Option(help="Byte pairs that were merged, or pieces with a probability.")
    ] = "bpe",
    vocab_size: Annotated[int, typer.Option(min=257, help="Tokens, 256 bytes and special tokens included.")] = 32000,
    special: Annotated[
        list[str] | None,
        typer.Option(help="bos, mask, NAME=TEXT as in eos=<|end|>, or a further special token; may be repeated."),
    ] = None,
    column: Annotated[str, typer.Option(help="Where rows keep their text.")] = "text",
    on_bad_row: Annotated[
        Literal["error", "skip"], typer.Option(help="What becomes of rows that cannot be used.")
    ] = "error",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a tokenizer.")] = False,
) -> None:
    """Train a tokenizer on texts; any text comes back from its tokens exactly."""
    from ..recipes.errors import UserError
    from ..recipes.tokens.trained_tokenizer import write_tokenizer

    *sources, target = paths
    if not sources:
        raise UserError("name the texts and then the folder to write: anyformer tokenizer SOURCE... OUT")
    settings = {"special": special or (), "column": column, "skip": on_bad_row == "skip", "overwrite": overwrite}
    for line in write_tokenizer(sources, Path(target), kind, vocab_size, **settings):  # type: ignore[arg-type]
        typer.echo(line)
