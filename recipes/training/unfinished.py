"""Checkpoints on their way: written in a hidden folder of the run's, named once they are whole."""

import shutil
from pathlib import Path

from ..atomic import flush, sync
from .manifest import MANIFEST, missing_part, write_manifest

# Beside the checkpoints, so that a rename moves nothing between file systems.
SAVING = ".saving"
PREFIX = "checkpoint-"


def step_of(folder: Path) -> int:
    """The number in a checkpoint's name; -1 where it is none."""
    number = folder.name.removeprefix(PREFIX)
    return int(number) if number != folder.name and number.isdigit() else -1


def checkpoint_folders(run: Path) -> list[Path]:
    """By their steps, whole or not."""
    return sorted((path for path in run.glob(f"{PREFIX}*") if step_of(path) >= 0 and path.is_dir()), key=step_of)


def begin(run: Path, name: str) -> None:
    """An empty folder for a new checkpoint; what an earlier attempt left is removed."""
    discard(run)
    (run / SAVING / name).mkdir(parents=True)


def finish(run: Path, name: str) -> None:
    """Give a written checkpoint its list of files, have all of it on the disk, and only then its name.

    A checkpoint of the same step steps aside first. A process that is killed between the two renames leaves the new one
    whole under `.saving`, where `recover` finds it.
    """
    folder, target = run / SAVING / name, run / name
    write_manifest(folder)
    flush(folder)
    before = run / SAVING / f"replaced-{name}"
    if target.exists():
        target.rename(before)
    try:
        folder.rename(target)
    except OSError:
        if before.exists():
            before.rename(target)  # what is left under `.saving` is removed
        raise
    sync(run)
    discard(run)


def discard(run: Path) -> None:
    """Remove what is unfinished, if anything is."""
    shutil.rmtree(run / SAVING, ignore_errors=True)


def recover(run: Path) -> None:
    """After a kill: a checkpoint that was whole but for its name gets it, anything else unfinished is removed."""
    for folder in checkpoint_folders(run / SAVING):
        target = run / folder.name
        if (folder / MANIFEST).is_file() and not target.exists() and not missing_part(folder, checksums=True):
            folder.rename(target)
            sync(run)
    discard(run)


def remove_oldest(run: Path, keep: int | None, *, newest: int, best: str | None) -> None:
    """Remove checkpoints until `keep` are left; what is broken, or of a later step than the run's, goes first.

    Each leaves under another name, so that a kill never leaves half of one behind.

    Args:
        keep: None or 0 keeps all.
        newest: the step that was saved last; its checkpoint stays.
        best: folder of a checkpoint that stays too.
    """
    if not keep:
        return
    found = checkpoint_folders(run)
    spared = {run / f"{PREFIX}{newest}"} | ({run / Path(best).name} if best else set())
    order = sorted(found, key=lambda path: (step_of(path) <= newest and not missing_part(path), step_of(path)))
    surplus = len(found) - max(keep, len(spared & set(found)))
    for folder in [path for path in order if path not in spared][: max(surplus, 0)]:
        (run / SAVING).mkdir(exist_ok=True)
        folder.rename(run / SAVING / f"old-{folder.name}")
    discard(run)
