"""`anyformer train`: train what a recipe describes."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..recipes.stages import Pipeline


def command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A YAML file, a folder of stages, or a shipped name (see `anyformer list`)."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            help="Changes to the recipe: section.key=value (the value is YAML), ~section.key to remove a key. "
            "Of a pipeline: STAGE.section.key=value changes one stage, section.key=value every stage.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in train.output_dir, or begin.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in train.output_dir.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run would do, then stop.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Before the first step, also check packing and gradient accumulation; costs a few."
        ),
    ] = False,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print the recipe with all that it extends and overrides, then stop."),
    ] = False,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="STRATEGY",
            help="Train in several processes, by `accelerate launch`: ddp, fsdp2, tp or deepspeed. Of a process that "
            "a launcher has started already: what it must be part of.",
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many processes; by default one for each GPU of this machine.")
    ] = None,
) -> None:
    """Train what a recipe describes.

    For example: anyformer train quickstart train.learning_rate=1e-4 train.max_steps=20
    """
    from ..recipes.errors import UserError
    from ..recipes.loading import find_pipeline, load_recipe
    from ..recipes.parallel.strategy import asked_for, launched
    from ..recipes.schema.sections import GLOBAL_BATCH

    if resume and overwrite:
        raise UserError("--resume goes on with the earlier run and --overwrite replaces it: give one of them")
    pipeline = find_pipeline(recipe) is not None
    loaded: Any = _pipeline(recipe, overrides or ()) if pipeline else load_recipe(recipe, overrides or ())
    if print_config:
        typer.echo(loaded.to_yaml(), nl=False)
        return
    if launch not in (None, "one") and not launched():
        from ..recipes.parallel.launch import launch as start

        # Each process gets this very command line and checks that it is in what the command line asks for.
        rows = None if pipeline else loaded.train.get(GLOBAL_BATCH)
        raise typer.Exit(start(str(launch), processes, sys.argv[1:], rows))
    parallel = asked_for(launch, processes)
    from ..recipes.parallel.world import begun, leave

    with begun(parallel):
        if pipeline:
            from ..recipes.pipeline import run_pipeline

            run: Callable[..., Any] = run_pipeline
        else:
            from ..recipes.run import run_recipe

            run = run_recipe
        run(loaded, resume=resume, overwrite=overwrite, dry_run=dry_run, check=check)
    leave()


def _pipeline(folder: str, overrides: Sequence[str]) -> "Pipeline":
    from ..recipes.stages import load_pipeline

    return load_pipeline(folder, overrides)
