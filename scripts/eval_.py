"""`anyformer eval`: what a model is worth on data."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..recipes.errors import UserError
from ..recipes.scoring.names import METRICS


class Rows(StrEnum):
    single = "single"
    packed = "packed"


On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="DATA",
        help="A file, a built-in data set, hub:user/name, or a mapping as in a recipe, such as "
        "'{hub: user/name, split: test}'; of a run by default the rows that it held out.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Where the figures go; by default scores.json in the folder of a run."),
]
Packed = Annotated[
    Rows, typer.Option(help="packed: several texts share a row and do not see each other; the figures are equal.")
]
Tasks = Annotated[
    str | None,
    typer.Option(help="Instead of rows: tasks of lm-evaluation-harness or YAML files of them; with commas between."),
]


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder or a Hub id.")],
    on: On = None,
    metrics: Annotated[str | None, typer.Option(help=f"Of {', '.join(METRICS)}; with commas between.")] = None,
    tasks: Tasks = None,
    fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each document of a task.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at once; no figure depends on it.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Of so many rows alone.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window of a long text; by default the model's length.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens by which windows go on; by default half of one.")
    ] = None,
    rows: Packed = Rows.single,
    output: Output = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the repository.")
    ] = False,
) -> None:
    """Measure a model on data: perplexity, answers or classes, each with its interval; or by tasks.

    For example: anyformer eval runs/quickstart --metrics perplexity,exact-match
    """
    from ..recipes.scoring.kinds import Settings
    from ..recipes.scoring.run import evaluate, evaluate_tasks, show

    if tasks is not None:
        if on is not None or metrics is not None:
            raise UserError("--tasks have data and metrics of their own: leave --on and --metrics out, or --tasks")
        found = evaluate_tasks(
            model,
            _names(tasks),
            limit=limit,
            num_fewshot=fewshot,
            batch_size=batch_size,
            output=output,
            trust_remote_code=trust_remote_code,
        )
        show(found, as_json=as_json)
        return
    if fewshot is not None:
        raise UserError("--fewshot is for tasks: name them with --tasks")
    found = evaluate(
        model,
        on,
        metrics=_names(metrics),
        limit=limit,
        settings=Settings(batch_size, max_new_tokens, context, stride, rows.value),
        output=output,
        trust_remote_code=trust_remote_code,
        tell=lambda text: typer.echo(text, err=True),
    )
    show(found, as_json=as_json)


def _names(given: str | None) -> list[str]:
    return [name.strip() for name in (given or "").split(",") if name.strip()]
