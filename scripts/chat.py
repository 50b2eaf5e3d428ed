"""`anyformer chat`: talk to a model in the terminal."""

from typing import Annotated

import typer


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder or a Hub id.")],
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    draft: Annotated[
        str | None,
        typer.Option(
            help="What drafts: a trained drafter, a smaller model with the same tokens, or lookup (from the text)."
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the repository.")
    ] = False,
) -> None:
    """Talk to a model: several turns, answers as they come. /clear forgets, /exit or Ctrl-D leaves."""
    from ..recipes.chat import chat

    chat(
        model,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        draft=draft,
        trust_remote_code=trust_remote_code,
    )
