"""`anyformer ladder`: what each part of an architecture buys."""

from typing import Annotated

import typer


def command(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LADDER] [OVERRIDES]",
            help="A folder of stages that pretrain new models and differ in their architecture, by default the shipped "
            "`ladder`; then changes as `anyformer train` takes them: train.seed=1, or moe.model.config.num_experts=4.",
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Tokens that each rung is trained on, as 2M.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep finished rungs and go on; measure a finished ladder again.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace all rungs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after the plans of all rungs.")] = False,
) -> None:
    """Train a ladder of architectures, one part changed at a time, and compare them.

    For example: anyformer ladder --budget 1M
    """
    from ..recipes.ladder.run import run_ladder

    words = overrides or []
    named = bool(words) and "=" not in words[0] and not words[0].startswith("~")
    name, changes = (words[0], words[1:]) if named else ("ladder", words)
    run_ladder(name, changes, budget=budget, resume=resume, overwrite=overwrite, dry_run=dry_run)
