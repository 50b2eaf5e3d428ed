"""`anyformer push`: upload the folder of a run to the Hub."""

from pathlib import Path
from typing import Annotated

import typer

from ..recipes.hub import load_snippet, push_run


def push(run: Path, repo: str, private: bool = True, revision: str | None = None, message: str | None = None) -> str:
    """Push `run` to `repo`, print the URL of the commit and how to load the model, and return the URL."""
    url = push_run(run, repo, private=private, revision=revision, commit_message=message)
    typer.echo(url)
    typer.echo(load_snippet(run, repo, revision))
    return url


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub, OWNER/NAME.", show_default=False)],
    revision: Annotated[str | None, typer.Option(help="Branch to push to; made if it is missing.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Create the repository public.")] = False,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
) -> None:
    """Upload a run to the Hub as a model repository, private unless told otherwise, in one commit."""
    push(run, repo, private=not public, revision=revision, message=message)
