"""The verb `data`: from the name of a recipe to an inspection in the terminal, as a page or as JSON."""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import make_console
from ..errors import UserError
from ..loading import find_pipeline, load_recipe
from ..pages import check_page_file
from ..run_folder import RunFolder
from .collect import inspect_recipe

if TYPE_CHECKING:
    from ..schema import Recipe


def show_data(
    name: str,
    overrides: Sequence[str] = (),
    *,
    stage: str | None = None,
    html: Path | None = None,
    rows: int = 3,
    as_json: bool = False,
) -> None:
    """Show what a recipe, or a stage of a pipeline, would train on.

    Args:
        html: a file to write a page to.
        rows: how many of the first rows are shown.
        as_json: print figures and nothing else.

    Raises:
        UserError: whatever is wrong with the recipe or its data, or a page that cannot be written.
    """
    from ..run_checks import faults_told
    from .terminal import show

    if html is not None:
        check_page_file(html, "data.html")
    recipe = recipe_of(name, overrides, stage)
    make_console(recipe)
    # What a function of the user's or a library prints is no part of the figures.
    with faults_told(), redirect_stdout(sys.stderr) if as_json else nullcontext():
        inspection = inspect_recipe(recipe, f"{name}, stage {stage}" if stage else name, rows=rows)
    if html is not None:
        from .page import write_page

        write_page(inspection, html)
    if as_json:
        json.dump(inspection.as_dict(), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        sys.stdout.write("\n")
        return
    from rich.console import Console

    console = Console(highlight=False)
    show(console, inspection)
    if html is not None:
        console.print(f"\nPage: {html}", markup=False, soft_wrap=True)


def recipe_of(name: str, overrides: Sequence[str], stage: str | None) -> "Recipe":
    """The recipe, or the stage's as it can be read before the earlier ones have run."""
    if not find_pipeline(name):
        if stage is not None:
            raise UserError(f"--stage: {name} is one recipe, no folder of stages: leave it out")
        return load_recipe(name, overrides)
    from ..stages import load_pipeline

    pipeline = load_pipeline(name, overrides)
    names = [each.name for each in pipeline.stages]
    if stage not in names:
        wrong = "is a folder of stages" if stage is None else f"has no stage {stage!r}"
        raise UserError(f"{name} {wrong}: name one with --stage {' | '.join(names)}")
    done = [each.name for each in pipeline.stages if RunFolder(each.folder).finished]
    recipe = pipeline.planned(pipeline[stage], done)
    if recipe is None:
        raise UserError(f"stage {stage} can be looked at once {', '.join(pipeline[stage].inputs)} has run")
    return recipe
