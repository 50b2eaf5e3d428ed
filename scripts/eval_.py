"""`anyformer eval`: what a model is worth on data."""

from enum import StrEnum
from functools import partial
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

Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, help="Of samples for pass@k; by default 0 for one, the likeliest token, 0.8 for several."),
]
Reward = Annotated[
    str | None,
    typer.Option(help="Who judges the win rate: a reward model, FILE.py:FUNCTION, or a reward of a recipe."),
]
Against = Annotated[
    str | None,
    typer.Option(metavar="MODEL2", help="Held against this model's answers; by default those of the rows."),
]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Run programs that the model wrote, for pass@k.")]
Context = Annotated[int | None, typer.Option(help="Tokens of a window of a long text; by default the model's length.")]
Stride = Annotated[int | None, typer.Option(min=1, help="Tokens by which windows go on; by default half of one.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the repository.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")]
Samples = Annotated[int, typer.Option(min=1, help="Of each problem, for pass@k.")]


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder or a Hub id.")],
    on: On = None,
    metrics: Annotated[str | None, typer.Option(help=f"Of {', '.join(METRICS)}; with commas between.")] = None,
    tasks: Tasks = None,
    fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each document of a task.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Tasks go through the model's chat template.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at once; no figure depends on it.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Of so many rows alone.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    context: Context = None,
    stride: Stride = None,
    rows: Packed = Rows.single,
    samples: Samples = 1,
    k: Annotated[str, typer.Option(help="Of so many samples one passes; several with commas between.")] = "1",
    temperature: Temperature = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples.")] = 0,
    allow_code: AllowCode = False,
    reward: Reward = None,
    against: Against = None,
    output: Output = None,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure a model on data: perplexity, answers or classes, each with its interval; or by tasks.

    For example: anyformer eval runs/quickstart --metrics perplexity,exact-match
    """
    from ..recipes.scoring.kinds import Judge, Sampling, Settings
    from ..recipes.scoring.run import evaluate, evaluate_tasks, show

    if tasks is not None:
        if on is not None or metrics is not None:
            raise UserError("--tasks have data and metrics of their own: leave --on and --metrics out, or --tasks")
        evaluate_tasks(
            model,
            _names(tasks),
            limit=limit,
            num_fewshot=fewshot,
            chat=chat,
            batch_size=batch_size,
            output=output,
            trust_remote_code=trust_remote_code,
            tell=lambda text: typer.echo(text, err=True),
            report=partial(show, as_json=as_json),
        )
        return
    if fewshot is not None or chat:
        raise UserError(f"{'--chat' if chat else '--fewshot'} is for tasks: name them with --tasks")
    wanted = _names(metrics)
    if metrics is not None and not wanted:
        raise UserError(
            f"--metrics {metrics!r} names none: leave it out for the usual ones, or give some of {', '.join(METRICS)}"
        )
    sampling = Sampling(samples, _numbers(k), temperature, seed, allow_code)
    settings = Settings(batch_size, max_new_tokens, context, stride, rows.value, sampling, Judge(reward, against))
    evaluate(
        model,
        on,
        metrics=wanted,
        limit=limit,
        settings=settings,
        output=output,
        trust_remote_code=trust_remote_code,
        tell=lambda text: typer.echo(text, err=True),
        report=partial(show, as_json=as_json),
    )


def _names(given: str | None) -> list[str]:
    return [name.strip() for name in (given or "").split(",") if name.strip()]


def _numbers(given: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(number) for number in _names(given)}))
    except ValueError as error:
        raise UserError(f"--k {given}: give whole numbers, with commas between") from error
