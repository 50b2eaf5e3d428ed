"""`anyformer families`: what is imported and exported, and how exactly."""

from typing import Annotated

import typer


def command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Families by model_type; default: all.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Compare tiny random models with the stock classes.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a markdown table.")] = False,
) -> None:
    """List the model families that are imported and exported.

    With --measure the exit status is 1 if one of them differs from its stock class.
    """
    from ..recipes import families as suite

    chosen = suite.find_families(names or ())
    measured = []
    if measure:
        for number, family in enumerate(chosen, 1):
            typer.echo(f"[{number}/{len(chosen)}] {family.model_type}", err=True)
            measured.append(suite.measure(family))
            if measured[-1].error:
                typer.echo(f"  {measured[-1].error}", err=True)
    table = suite.rows(chosen, measured)
    typer.echo(suite.as_markdown(table) if markdown else suite.as_text(table))
    if not all(found.equal for found in measured):
        raise typer.Exit(1)
