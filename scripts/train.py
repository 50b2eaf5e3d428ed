"""`anyformer train`: train what a recipe describes."""

from typing import Annotated

import typer


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
        bool, typer.Option("--resume", help="Go on from the last checkpoint in train.output_dir.")
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
) -> None:
    """Train what a recipe describes.

    For example: anyformer train quickstart train.learning_rate=1e-4 train.max_steps=20
    """
    from ..recipes.errors import UserError
    from ..recipes.loading import find_pipeline, load_recipe

    if resume and overwrite:
        raise UserError("--resume goes on with the earlier run and --overwrite replaces it: give one of them")
    if find_pipeline(recipe):
        from ..recipes.stages import load_pipeline

        pipeline = load_pipeline(recipe, overrides or ())
        if print_config:
            typer.echo(pipeline.to_yaml(), nl=False)
            return
        from ..recipes.pipeline import run_pipeline

        run_pipeline(pipeline, resume=resume, overwrite=overwrite, dry_run=dry_run, check=check)
        return
    loaded = load_recipe(recipe, overrides or ())
    if print_config:
        typer.echo(loaded.to_yaml(), nl=False)
        return
    from ..recipes.run import run_recipe

    run_recipe(loaded, resume=resume, overwrite=overwrite, dry_run=dry_run, check=check)
