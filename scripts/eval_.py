"""`anyformer eval`: what a model is worth on data."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Rows(StrEnum):
    single = "single"
    packed = "packed"


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder or a Hub id.")],
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="DATA",
            help="A file, a built-in data set, hub:user/name, or a mapping as in a recipe, such as "
            "'{hub: user/name, split: test}'; of a run by default the rows that it held out.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Of perplexity, exact-match, f1, bleu, chrf, accuracy, macro-f1, span-f1; with commas between."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at once; no figure depends on it.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Of so many rows alone.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window of a long text; by default the model's length.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens by which windows go on; by default half of one.")
    ] = None,
    rows: Annotated[
        Rows, typer.Option(help="packed: several texts share a row and do not see each other; the figures are equal.")
    ] = Rows.single,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the figures go; by default scores.json in the folder of a run."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the repository.")
    ] = False,
) -> None:
    """Measure a model on data: perplexity, answers or classes, each with its interval.

    For example: anyformer eval runs/quickstart --metrics perplexity,exact-match
    """
    from ..recipes.scoring.kinds import Settings
    from ..recipes.scoring.run import evaluate, show

    found = evaluate(
        model,
        on,
        metrics=[name.strip() for name in (metrics or "").split(",") if name.strip()],
        limit=limit,
        settings=Settings(batch_size, max_new_tokens, context, stride, rows.value),
        output=output,
        trust_remote_code=trust_remote_code,
        tell=lambda text: typer.echo(text, err=True),
    )
    show(found, as_json=as_json)
