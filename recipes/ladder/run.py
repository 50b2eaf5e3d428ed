"""A ladder from recipes to its table: train what is not trained yet, measure all rungs, write what was found."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..console import make_console
from ..errors import UserError
from ..pipeline import finished, run_pipeline
from ..planning.units import read_count
from ..run_folder import RunFolder, write_text
from ..stages import Pipeline, load_pipeline
from .measure import Figures, measure
from .rungs import Rung, rungs_of
from .table import draw, markdown, show_table

# What the ladder's folder holds beside the rungs' runs.
FIGURES, DOCUMENT, PICTURE = "ladder.json", "ladder.md", "ladder.svg"


def run_ladder(
    name: str,
    overrides: Sequence[str] = (),
    *,
    budget: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Path:
    """Train the rungs of a ladder, measure them and return its folder.

    Args:
        name: a folder of stages, or a shipped pipeline.
        overrides: as `anyformer train` takes them for pipelines.
        budget: tokens that each rung is trained on, as 2M, instead of the recipes' own.
        resume: finished rungs are kept, the one in progress goes on; of a finished ladder only the figures are taken
            again.

    Raises:
        UserError: whatever the user can mend, before the first rung trains wherever the facts allow.
    """
    pipeline = load_pipeline(name, overrides)
    if budget is not None:
        pipeline = load_pipeline(name, [*overrides, f"train.max_steps={_steps(pipeline, budget)}"])
    rungs = rungs_of(pipeline)
    console = make_console(pipeline.stages[0].recipe)
    if not (resume and finished(pipeline)):
        run_pipeline(pipeline, resume=resume, overwrite=overwrite, dry_run=dry_run)
    if dry_run:
        return pipeline.folder
    console.rule("ladder")
    found = measure(pipeline, rungs, lambda what: console.print(f"Measuring: {what}", markup=False))
    _write(pipeline, rungs, found)
    show_table(console, found, found[0].rows)
    console.print(f"Ladder: {pipeline.folder / DOCUMENT}, {PICTURE} and {FIGURES} beside it", markup=False)
    return pipeline.folder


def _steps(pipeline: Pipeline, budget: str) -> int:
    """Steps of a budget in tokens.

    Raises:
        UserError: it is no number of tokens, or less than a step.
    """
    tokens = read_count(budget, "--budget")
    a_step = _tokens_a_step(pipeline)
    if tokens < a_step:
        raise UserError(f"--budget {budget}: a step has {a_step:,} tokens: give at least that")
    return round(tokens / a_step)


def _tokens_a_step(pipeline: Pipeline) -> int:
    from ..planning.step_setting import trainer_value

    recipe = pipeline.stages[0].recipe
    length = getattr(recipe.objective, "max_length", None)
    if length is None:
        raise UserError("--budget: the recipes say no objective.max_length, so a step has no known number of tokens")
    rows = trainer_value(recipe, "per_device_train_batch_size") * trainer_value(recipe, "gradient_accumulation_steps")
    return int(recipe.train.get("global_batch_size") or rows) * length


def _write(pipeline: Pipeline, rungs: Sequence[Rung], found: Sequence[Figures]) -> None:
    recipe = pipeline.stages[0].recipe
    metrics = RunFolder(rungs[0].stage.folder).metrics
    shared: dict[str, Any] = {"steps": metrics["plan"]["steps"], "tokens": metrics["training"]["tokens"]}
    shared["seed"] = recipe.train.get("seed", 42)
    write_text(
        pipeline.folder / FIGURES,
        json.dumps({"shared": shared, "rungs": [each.as_dict() for each in found]}, indent=2, ensure_ascii=False)
        + "\n",
    )
    draw(found, pipeline.folder / PICTURE)
    about = (
        f"{len(found)} rungs, each a new model trained with the same data and budget: {shared['steps']:,} steps, "
        f"{shared['tokens']:,} tokens, seed {shared['seed']}. A rung changes one part of the one that it stands on."
    )
    write_text(pipeline.folder / DOCUMENT, markdown(pipeline.name, found, found[0].rows, about, PICTURE))
