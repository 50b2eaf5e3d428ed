"""The command `anyformer`.

A verb is one line in `VERBS` and one file in this folder that defines `command`, a function in typer's style.
A verb's file imports at its top nothing that is slow to import: `anyformer --help` reads them all.
"""

import difflib
import importlib
import os
import shlex
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..recipes.console import quiet_imports
from ..recipes.errors import Terminated, UserError

# Verb -> module in this folder. The help shows them in this order.
VERBS = {
    "train": "train",
    "data": "data",
    "plan": "plan",
    "ladder": "ladder",
    "show": "show",
    "compare": "compare",
    "chat": "chat",
    "generate": "generate",
    "eval": "eval_",
    "serve": "serve",
    "merge": "merge",
    "push": "push",
    "import": "import_",
    "export": "export",
    "list": "list_",
    "copy": "copy_",
    "families": "families",
    "tokenizer": "tokenizer",
    "tokenize": "tokenize_",
}


class _Verbs(TyperGroup):
    """Finds the verbs in `VERBS` and imports each when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            near = difflib.get_close_matches(cmd_name, VERBS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"no such command: {cmd_name!r}; {hint}Commands: {', '.join(VERBS)}")
        verb = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        verb.command(cmd_name)(importlib.import_module(f".{VERBS[cmd_name]}", __package__).command)
        return typer.main.get_command(verb)

    def invoke(self, ctx: Any) -> Any:
        quiet_imports()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(130) from None
        except Terminated as error:
            if os.environ.get("RANK", "0") == "0":  # of several processes, which all stop together
                typer.echo(f"{error}. {_how_to_go_on()}", err=True)
            raise typer.Exit(143) from None
        except UserError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None


def _how_to_go_on() -> str:
    if "WORLD_SIZE" in os.environ:  # started by a launcher, whose own arguments are not known here
        return "The same command with --resume goes on"
    given = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    return f"Go on with: {shlex.join(['anyformer', *given, '--resume'])}"


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anyformer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Any Transformer from one config, and its fine-tuning from one YAML file.

    Begin with `anyformer list`, then `anyformer train quickstart`.
    """


def main() -> None:
    """Run the command line and exit.

    0: done; 2: the user can put it right; 130: interrupted; 143: stopped by SIGTERM after a checkpoint.
    """
    sys.exit(app())
