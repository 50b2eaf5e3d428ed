"""`anyformer generate`: answers to prompts, on standard output or as JSONL."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Template(StrEnum):
    auto = "auto"
    chat = "chat"
    none = "none"


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder or a Hub id.")],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="What is to be answered.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Prompts, one a line, or JSONL rows with `prompt`; answers come as JSONL.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    template: Annotated[
        Template, typer.Option(help="chat: prompts are user messages; none: text to go on with.")
    ] = Template.auto,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Sample from so much of the probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 8,
    draft: Annotated[
        str | None,
        typer.Option(
            help="What drafts: a trained drafter, a smaller model with the same tokens, or lookup (copies "
            "from the text). Prompts are then answered one by one."
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the repository.")
    ] = False,
) -> None:
    """Answer prompts with a model: those given, or those of a file."""
    from ..recipes.errors import UserError
    from ..recipes.generation import generate, read_prompts

    if bool(prompts) == (file is not None):
        raise UserError("give prompts, or --file with prompts: one of the two")
    asked = prompts or read_prompts(file)  # type: ignore[arg-type]
    answers = generate(
        model,
        asked,
        system=system,
        template=template.value,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
        draft=draft,
        tell=lambda text: typer.echo(text, err=True),
        trust_remote_code=trust_remote_code,
    )
    for prompt, answer in zip(asked, answers, strict=True):
        typer.echo(json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) if file else answer)
