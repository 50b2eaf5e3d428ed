"""Folders that are either whole or not there."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UserError


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Read while nothing else runs: asking for it changes it for a moment.
_UMASK = _umask()


@contextmanager
def new_folder(target: Path, *, overwrite: bool, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """A folder to write into that takes its name once everything in it is on the disk.

    What is written lies in a hidden folder beside the target until then. An exception removes that; a process that is
    killed leaves it behind, and nothing under the target's name.

    Args:
        overwrite: replace what stands under the name, once the new folder is whole.
        replaceable: whether an existing folder is of the kind that is written, so that nothing else is ever deleted.

    Raises:
        UserError: the target exists and may not be replaced, or the disk is full or cannot be written.
    """
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise UserError(f"{target} exists already: choose another folder, or give --overwrite to replace it")
        if not (target.is_dir() and not target.is_symlink() and (replaceable(target) or not any(target.iterdir()))):
            raise UserError(f"{target} holds something else and is not replaced: choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        yield folder
        folder.chmod(0o777 & ~_UMASK)  # temporary folders are private, the result is like any other
        flush(folder)
        _take_name(folder, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def leftovers(target: Path) -> list[Path]:
    """What earlier runs for the same target left behind when they were killed, or what still grows."""
    return sorted(target.parent.glob(f".{target.name}.partial-*")) if target.parent.is_dir() else []


def share(paths: Iterable[Path]) -> None:
    """Give files that are their owner's alone, as safetensors and temporary ones are, the permissions of any other."""
    for path in paths:
        with suppress(OSError):  # of a file system that gives all files the same ones
            if path.is_file() and path.stat().st_mode & 0o777 == 0o600:
                path.chmod(0o666 & ~_UMASK)


def flush(*places: Path) -> None:
    """Have files, and folders with all below, on the disk, as readable as any other."""
    paths = [path for place in places for path in [*place.rglob("*"), place] if path.exists()]
    share(paths)
    for path in paths:
        sync(path)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _take_name(folder: Path, target: Path) -> None:
    """Give the folder its name, in the place of what has it now."""
    old = None
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
        target.rename(old / target.name)
    try:
        folder.rename(target)
    except OSError:
        if old is not None:
            (old / target.name).rename(target)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    sync(target.parent)
