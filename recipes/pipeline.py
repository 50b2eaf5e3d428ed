"""The stages of a pipeline one after the other, resumable between them and inside them, and a report on all of them."""

import gc
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .adapters.bases import check_base_can_be_named
from .console import make_console, show_plan
from .errors import UserError
from .prepare import Prepared, model_of, prepare
from .run import run_recipe
from .run_checks import check_inputs_survive, check_repository, faults_told
from .run_folder import METRICS, RECIPE, Record, RunFolder, changed_training
from .schema import OBJECTIVES, Recipe
from .stages import Pipeline, Stage
from .tokens.learned_tokenizer import learned_size

if TYPE_CHECKING:
    from rich.console import Console

Work = Literal["skip", "resume", "start"]
# What the pipeline's own folder holds beside the stages' runs.
RECORD, REPORT, CURVES = "pipeline.json", "report.md", "curves.png"


def run_pipeline(
    pipeline: Pipeline, *, resume: bool = False, overwrite: bool = False, dry_run: bool = False, check: bool = False
) -> Path:
    """Run all stages of a pipeline, write the report, and return the pipeline's folder.

    Args:
        resume: go on where the pipeline stopped: skip finished stages, resume the one in progress.
        overwrite: replace all stages.
        dry_run: stop after the plans of all stages; nothing is written and no weight is loaded.
        check: make the costly checks of `flight_checks` too, before the first step of each stage.

    Raises:
        UserError: whatever the user can mend; of any stage found before the first one trains, where the facts allow.
    """
    console = make_console(pipeline.stages[-1].recipe)
    record = Record(pipeline.folder / RECORD)
    _check_one_process()
    _check_recipes(pipeline)
    work: dict[str, Work] = {stage.name: "start" for stage in pipeline.stages}
    if not dry_run:
        work = _work_to_do(pipeline, record, resume=resume, overwrite=overwrite)
    show_stages(console, pipeline, work)
    # Each stage reads its data again when its turn comes: all of them at once are not kept.
    for warning in check_held_out(pipeline, _prepare_all(pipeline, work, console, shown=dry_run)):
        console.print(f"Warning: {warning}.", markup=False)
    if dry_run:
        console.print("Dry run: nothing was loaded, trained or written.")
        return pipeline.folder
    for stage in pipeline.stages:
        if work[stage.name] != "skip":
            with _naming(stage):
                check_repository(stage.recipe)
    with RunFolder(pipeline.folder).held():
        if overwrite:
            _clear(pipeline)
        _run_all(pipeline, work, record, console, check=check)
    return pipeline.folder


def _run_all(pipeline: Pipeline, work: Mapping[str, Work], record: Record, console: "Console", *, check: bool) -> None:
    for number, stage in enumerate(pipeline.stages, 1):
        console.rule(f"stage {number} of {len(pipeline.stages)}: {stage.name}")
        if work[stage.name] == "skip":
            console.print(f"Finished already: {stage.folder}", markup=False)
        else:
            _run(pipeline, stage, work[stage.name], record, check=check)
    _report(pipeline, record, console)


def _run(pipeline: Pipeline, stage: Stage, work: Work, record: Record, *, check: bool) -> None:
    import torch

    # Before the run: what it leaves behind, whenever it ends, was made from these.
    record.update(inputs=record.values.get("inputs", {}) | {stage.name: _inputs(pipeline, stage)}, finished=False)
    fresh = {"resume": True} if work == "resume" else {"overwrite": True}
    with _naming(stage):
        run_recipe(pipeline.resolved(stage), **fresh, check=check, next_steps=False)
    # Trainers refer to themselves in circles: without this the next stage would load beside the last one's model.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _report(pipeline: Pipeline, record: Record, console: "Console") -> None:
    from .pipeline_report import figures_of, show_report, write_report

    console.rule("report")
    with faults_told():
        figures = figures_of(pipeline)
    write_report(pipeline, figures, report=pipeline.folder / REPORT, curves=pipeline.folder / CURVES)
    record.update(report=figures, finished=True)
    show_report(console, figures)
    console.print(f"Report: {pipeline.folder / REPORT}", markup=False)
    if figures["chat"]:
        console.print(f"\nNext:\n  anyformer chat {figures['chat']}", markup=False)


@contextmanager
def _naming(stage: Stage) -> Iterator[None]:
    """Say of a fault in which stage it is."""
    try:
        with faults_told():
            yield
    except UserError as error:
        raise UserError(f"stage {stage.name} ({stage.file.name}): {error}") from error


# Before anything runs


def _check_one_process() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a pipeline runs in one process, and this is one of several: launch its stages one by one, with the folder "
            "of an earlier stage in place of its name"
        )


def _check_recipes(pipeline: Pipeline) -> None:
    """What can be told of each stage without its data.

    Raises:
        UserError: a result that could not be opened, or data in a folder that a stage writes.
    """
    for stage in pipeline.stages:
        with _naming(stage):
            check_base_can_be_named(stage.recipe)
            for other in pipeline.stages:
                check_inputs_survive(stage.recipe, other.folder)


def _work_to_do(pipeline: Pipeline, record: Record, *, resume: bool, overwrite: bool) -> dict[str, Work]:
    """What is to be done with each stage, as its folder stands; nothing is changed but what a kill left unfinished.

    Raises:
        UserError: folders that hold something else, or runs that may neither be gone on with nor replaced.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite contradict each other: give one of them")
    if pipeline.folder.exists() and not pipeline.folder.is_dir():
        raise UserError(f"{pipeline.folder} is a file; train.output_dir must be the pipeline's folder")
    foreign = [name for name in (REPORT, CURVES) if (pipeline.folder / name).exists()]
    if foreign and not record.path.exists():
        raise UserError(f"{pipeline.folder / foreign[0]} is not of a pipeline: choose another train.output_dir")
    for stage in pipeline.stages:
        with _naming(stage):  # what belongs to others is never touched
            RunFolder(stage.folder).check("", resume=False, overwrite=True)
    begun = [stage for stage in pipeline.stages if not RunFolder(stage.folder).empty]
    if resume:
        work = _resumption(pipeline, record)
        if set(work.values()) == {"skip"} and record.values.get("finished"):
            raise UserError(f"{pipeline.folder} holds a finished pipeline: there is nothing to resume")
        return work
    if begun and not overwrite:
        done = [stage.name for stage in begun if RunFolder(stage.folder).finished]
        choices = "--overwrite to replace it, or train.output_dir=… for another folder"
        if not record.values.get("finished"):
            choices = f"--resume to go on, {choices}"
        raise UserError(
            f"{pipeline.folder} holds a pipeline (finished: {', '.join(done) or 'nothing'}): give {choices}"
        )
    return {stage.name: "start" for stage in pipeline.stages}


def _resumption(pipeline: Pipeline, record: Record) -> dict[str, Work]:
    work: dict[str, Work] = {}
    for stage in pipeline.stages:
        folder = RunFolder(stage.folder)
        folder.recover()
        if folder.finished:
            work[stage.name] = "skip"
        else:
            work[stage.name] = "resume" if folder.checkpoints else "start"
        if work[stage.name] != "start":
            _check_same(pipeline, stage, record, work)
    return work


def finished(pipeline: Pipeline) -> bool:
    """Whether all stages and the report are done, of this very pipeline.

    Raises:
        UserError: a stage's run was made by another recipe, from other rows or from other outputs.
    """
    record = Record(pipeline.folder / RECORD)
    return set(_resumption(pipeline, record).values()) == {"skip"} and bool(record.values.get("finished"))


def _check_same(pipeline: Pipeline, stage: Stage, record: Record, work: Mapping[str, Work]) -> None:
    """Raises:
    UserError: the stage's run was made by another recipe, or from other outputs of earlier stages.
    """
    remedy = f"Give --overwrite to train all stages anew, or remove {stage.folder} to train this one and go on"
    stored = (stage.folder / RECIPE).read_text(encoding="utf-8") if (stage.folder / RECIPE).is_file() else ""
    if changed := changed_training(stored, pipeline.resolved(stage).to_yaml()):
        raise UserError(
            f"stage {stage.name}: its recipe differs from the one that {stage.folder} was trained with, in "
            f"{', '.join(changed)}. Restore these values. {remedy}"
        )
    known = RunFolder(stage.folder).metrics.get("data_digest")
    if work[stage.name] == "skip" and known and _digest_of_rows(pipeline.resolved(stage)) != known:
        raise UserError(
            f"stage {stage.name}: its rows differ from those that {stage.folder} was trained on: data.source or "
            f"data.eval_source has changed. Restore the files. {remedy}"
        )
    before = record.values.get("inputs", {}).get(stage.name, {})
    now = {name: _fingerprint(pipeline[name]) if work[name] == "skip" else "" for name in stage.inputs}
    for name in stage.inputs:
        if before.get(name) != now[name]:
            raise UserError(
                f"stage {stage.name}: {stage.folder} was trained on another output of stage {name} than the one in "
                f"{pipeline[name].folder}. {remedy}"
            )


def _digest_of_rows(recipe: Recipe) -> str:
    from .data import load_splits
    from .objectives import objective_class

    return load_splits(recipe.data, accepts=objective_class(recipe.objective.kind).formats).digest


def _inputs(pipeline: Pipeline, stage: Stage) -> dict[str, str]:
    return {name: _fingerprint(pipeline[name]) for name in stage.inputs}


def _fingerprint(stage: Stage) -> str:
    """A mark of a finished run: its figures, times and logs are those of no other."""
    return hashlib.sha256((stage.folder / METRICS).read_bytes()).hexdigest()


def _prepare_all(
    pipeline: Pipeline, work: Mapping[str, Work], console: "Console", *, shown: bool
) -> dict[str, Prepared]:
    """Data and plan of each stage that is to run, so that a fault in the last one is found before the first."""
    done = [name for name, what in work.items() if what == "skip"]
    prepared: dict[str, Prepared] = {}
    opened: dict[Any, Any] = {}  # stages that start from one model read its config and tokenizer once
    for stage in pipeline.stages:
        if stage.name in done:
            continue
        recipe = pipeline.planned(stage, done)
        if shown:
            console.rule(stage.name)
        if recipe is None:
            console.print(f"{stage.name} can be planned once {', '.join(stage.inputs)} exists.", markup=False)
            continue
        with _naming(stage):
            shapes = OBJECTIVES[recipe.objective.kind].shapes
            learned = recipe.data.model_dump_json() if learned_size(recipe.model.tokenizer) else None
            start = (recipe.model.model_dump_json(), recipe.adapter.path, shapes, learned)
            if start not in opened:
                opened[start] = model_of(recipe, shapes)
            prepared[stage.name] = prepare(recipe, opened[start])
        if shown:
            if waiting := [name for name in stage.inputs if name not in done]:
                said = f"Planned as if {' and '.join(waiting)} had run: what a stage makes has the size of its start."
                console.print(said, markup=False)
            show_plan(console, prepared[stage.name])
    return prepared


def check_held_out(pipeline: Pipeline, prepared: Mapping[str, Prepared]) -> list[str]:
    """No stage may be measured on prompts that an earlier one was trained on.

    Returns:
        Warnings, where that happens with two different sources.

    Raises:
        UserError: it happens with one source, which the stages split otherwise.
    """
    from .data import prompt_key
    from .shards.selection import TokenDocuments

    # Documents in token shards are no prompts, and too many to be read for this.
    listed = {name for name, stage in prepared.items() if not isinstance(stage.splits.train, TokenDocuments)}
    warnings, known = [], [stage for stage in pipeline.stages if stage.name in listed]
    for index, later in enumerate(known):
        held = {prompt_key(row) for row in prepared[later.name].splits.eval}
        for earlier in known[:index]:
            trained = prepared[earlier.name].splits.train
            shared = len({key for row in trained if (key := prompt_key(row)) in held})
            if not shared:
                continue
            fault = f"{shared} of the {len(held)} prompts that stage {later.name} holds out are trained on in stage "
            fault += f"{earlier.name}"
            one, other = earlier.recipe.data, later.recipe.data
            if one.source != other.source:
                warnings.append(f"{fault}: its figures say little about new prompts")
                continue
            keys = ("seed", "eval_fraction", "eval_source", "max_rows", "columns", "format")
            differ = [f"data.{key}" for key in keys if getattr(one, key) != getattr(other, key)]
            raise UserError(
                f"{fault} ({earlier.file.name}, {later.file.name}): it would be measured on rows already seen. Split "
                f"{one.source} alike in both, or name the held-out rows in data.eval_source; they differ in "
                f"{', '.join(differ) or 'nothing but the rows that they can use'}"
            )
    return warnings


def _clear(pipeline: Pipeline) -> None:
    """Remove all runs at once: a later stage's old run must not outlive the earlier one that it was made from."""
    try:
        runs = [RunFolder(stage.folder) for stage in reversed(pipeline.stages)]
        with ExitStack() as stack:
            for run in runs:
                stack.enter_context(run.held())
            for name in (RECORD, REPORT, CURVES):
                (pipeline.folder / name).unlink(missing_ok=True)
            for run in runs:
                run.clear()
    except OSError as error:
        raise UserError(f"{pipeline.folder} cannot be replaced: {error.strerror}") from error


def show_stages(console: "Console", pipeline: Pipeline, work: Mapping[str, Work]) -> None:
    """The stages, what each starts from, and what is to be done with it."""
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table("stage", "objective", "starts from", Column("", no_wrap=True), title=escape(str(pipeline.folder)))
    for stage in pipeline.stages:
        model = stage.recipe.model
        said = {"skip": "finished: skipped", "start": "to train", "resume": ""}[work[stage.name]]
        if work[stage.name] == "resume":
            said = f"goes on from {RunFolder(stage.folder).checkpoints[-1].name}"
        cells = (stage.name, stage.recipe.objective.kind, model.path or f"a new {model.preset}")
        table.add_row(*map(escape, (*cells, said)))
    console.print(table)
