"""What is made sure before a run writes or loads anything, and faults of model and machine in the user's terms."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .disk import write_fault
from .errors import UserError
from .run_folder import RunFolder
from .schema import Recipe


def may_begin(recipe: Recipe, folder: RunFolder, held: ExitStack, *, resume: bool, overwrite: bool) -> bool:
    """Whether the run goes on from a checkpoint; asked of the first process, which puts right what a kill has left.

    Args:
        held: keeps the folder for this run until it is closed.

    Raises:
        UserError: the run may not use the folder, or its result could not be pushed.
    """
    held.enter_context(folder.held())
    if resume:
        folder.recover()
    folder.check(recipe.to_yaml(), resume=resume, overwrite=overwrite)
    check_repository(recipe)
    return resume and bool(folder.checkpoints)


def check_inputs_survive(recipe: Recipe, folder: Path) -> None:
    """Raises:
    UserError: what the run reads lies in the folder that it writes.
    """
    from .data.sources import local_places

    names = [name for value in (recipe.data.source, recipe.data.eval_source) for name in local_places(value)]
    for name in [recipe.model.path, recipe.model.tokenizer, recipe.adapter.path, *names]:
        if name and Path(name).exists() and Path(name).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"train.output_dir {folder} holds {name}, which the run reads: choose another folder")
    for name in names:
        place = Path(name).expanduser()
        if place.is_dir() and folder.resolve().is_relative_to(place.resolve()):
            raise UserError(
                f"train.output_dir {folder} lies in the folder {name}, all of which is read as data, also what the run "
                "writes: choose another folder, or a glob such as '*.jsonl'"
            )


def check_rows_a_step(folder: RunFolder, rows: int, *, resume: bool) -> None:
    """Raises:
    UserError: a run goes on with other rows a step, as with more processes of as many rows each.
    """
    before = folder.metrics.get("rows_a_step", rows) if resume else rows
    if before != rows:
        raise UserError(
            f"{folder.path} was started with {before} rows a step, now it is {rows}: a resumed run must train the "
            f"same. Set train.global_batch_size: {before}, which any number of processes shares"
        )


def check_repository(recipe: Recipe) -> None:
    """Raises:
    UserError: the result cannot be pushed where the recipe says.
    """
    if recipe.hub is not None:
        from .hub import check_push

        check_push(recipe.hub.repo, private=recipe.hub.private, revision=recipe.hub.revision)


@contextmanager
def faults_told(folder: Path | None = None) -> Iterator[None]:
    """Faults of a model or of the machine in the user's terms.

    Args:
        folder: that is written into.

    Raises:
        UserError: a model that cannot be converted, a device without room, or a disk that cannot be written.
    """
    import torch

    from ..modeling.interop import ConversionError

    try:
        yield
    except ConversionError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        if not (reason := write_fault(error)):
            raise
        place = error.filename or folder or "a file"
        raise UserError(f"{place} cannot be written: {reason}. Mend it, then go on with --resume") from error
    except torch.OutOfMemoryError as error:
        raise UserError(
            "the memory of the device is full. Lower train.per_device_train_batch_size or train.max_length, or set "
            "train.gradient_checkpointing: true"
        ) from error
