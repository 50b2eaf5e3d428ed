"""The folder of one run: a model repository, with the recipe, the figures and the checkpoints beside the weights."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .atomic import flush, sync
from .disk import cache_root
from .errors import UserError
from .training.manifest import missing_part
from .training.unfinished import SAVING, checkpoint_folders, recover, step_of

RECIPE, METRICS = "recipe.yaml", "metrics.json"
FIGURES = "metrics.csv"
# What each held-out row adds to the figures, see `held_rows`.
HELD_OUT = "held_out.json"
ADAPTER = "adapter"
# Seconds for what a killed run leaves behind to end: it may have processes that read its data.
_PATIENCE = 10.0
# Made with the folder: only what has it is ever replaced.
MARKER = ".anyformer-run"
# Keys of `train` that say what is kept and shown, not what is trained.
RESUMABLE = {
    "output_dir",
    "save_steps",
    "save_strategy",
    "save_total_limit",
    "logging_steps",
    "logging_strategy",
    "eval_steps",
    "eval_strategy",
    "per_device_eval_batch_size",
    # How a step's rows are shared; their number is compared by itself, see `run.check_rows_a_step`.
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "report_to",
    "run_name",
    "disable_tqdm",
    "dataloader_num_workers",
}


class Record:
    """A JSON file of values that are added to as they become known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def values(self) -> dict[str, Any]:
        """All of them; nothing where there is no file.

        Raises:
            UserError: the file is damaged.
        """
        try:
            return json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        except ValueError as error:
            raise UserError(
                f"{self.path} is damaged ({error}): remove it, or give --overwrite to start again"
            ) from error

    def update(self, **values: Any) -> dict[str, Any]:
        """Add values and return all of them."""
        known = self.values | values
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(known, indent=2, ensure_ascii=False) + "\n")
        return known


class RunFolder:
    """Reads and writes what a run keeps; nothing of an earlier run is lost unless the user says so.

    Args:
        writes: of several processes only the first one writes.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep another run of the same user out of the folder.

        Raises:
            UserError: one writes it.
        """
        name = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:32]
        try:
            place = cache_root() / "running"
            place.mkdir(parents=True, exist_ok=True)
            lock = FileLock(place / f"{name}.lock")
            lock.acquire(timeout=_PATIENCE)
        except Timeout as error:
            raise UserError(
                f"{self.path} is being written by another run: stop that one, wait for it, or choose another "
                "train.output_dir"
            ) from error
        except (OSError, RuntimeError, NotImplementedError):  # without a home, or on a file system without locks
            yield
            return
        try:
            yield
        finally:
            lock.release()

    @property
    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return [p for p in checkpoint_folders(self.path) if not missing_part(p)]

    @property
    def broken_checkpoints(self) -> list[tuple[Path, str]]:
        """Checkpoints that cannot be resumed from, as after a kill while they were written, and what is wrong."""
        return [(p, part) for p in checkpoint_folders(self.path) if (part := missing_part(p))]

    def newest_checkpoint(self) -> tuple[Path, list[tuple[Path, str]]]:
        """The newest checkpoint whose files have their checksums, and those passed over for it, with their faults.

        Raises:
            UserError: there is none.
        """
        broken: list[tuple[Path, str]] = []
        for folder in reversed(checkpoint_folders(self.path)):
            if not (part := missing_part(folder, checksums=True)):
                return folder, broken
            broken.append((folder, part))
        raise UserError(self._nothing_whole(broken))

    def _nothing_whole(self, broken: list[tuple[Path, str]]) -> str:
        told = "; ".join(f"{folder.name}: {part}" for folder, part in broken)
        return (
            f"{self.path} holds no checkpoint to resume from{f' ({told})' if told else ''}. Restore one, or give "
            "--overwrite in place of --resume to start again"
        )

    @property
    def metrics(self) -> dict[str, Any]:
        return Record(self.path / METRICS).values

    @property
    def finished(self) -> bool:
        """Saved, reported and opened again."""
        return bool(self.metrics.get("finished"))

    def check(self, recipe_yaml: str, *, resume: bool, overwrite: bool) -> None:
        """Make sure that the run may use the folder; nothing is changed.

        Raises:
            UserError: it holds a run and neither `resume` nor `overwrite` is given; all checkpoints to resume from are
                broken; the recipe to resume with describes other training.
        """
        if resume and overwrite:
            raise UserError("--resume and --overwrite contradict each other: give one of them")
        try:
            is_other = self.path.exists() and not self.path.is_dir()
        except OSError as error:
            raise UserError(f"train.output_dir {self.path} cannot be used: {error.strerror}") from error
        if is_other:
            raise UserError(f"{self.path} is a file; train.output_dir must be a folder")
        if resume:
            self._require_resumable(recipe_yaml)
        elif not self.empty:
            self._require_replaceable(overwrite)

    def open(self, recipe_yaml: str, *, resume: bool, keep: bool = False) -> None:
        """Begin to write: clear the folder unless a run goes on, and store the recipe. Call `check` first.

        Args:
            keep: leave what there is, but for the figures, though no run goes on.

        Raises:
            UserError: the folder cannot be written.
        """
        if not self.writes:
            return
        try:
            if keep and not resume:
                for name in (METRICS, HELD_OUT):
                    (self.path / name).unlink(missing_ok=True)
            elif not resume:
                self.clear()
            self.path.resolve().mkdir(parents=True, exist_ok=True)
            (self.path / MARKER).touch()
            write_text(self.path / RECIPE, recipe_yaml)
        except OSError as error:
            raise UserError(f"train.output_dir {self.path} cannot be written: {error.strerror}") from error

    def clear(self) -> None:
        """Remove the run, where the folder holds one; a link to the folder stays."""
        if (self.path / MARKER).is_file():
            folder = self.path.resolve()
            # The marker last: a kill in between leaves a folder that is still known as a run's.
            for path in (path for path in folder.iterdir() if path.name != MARKER):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            shutil.rmtree(folder)

    def recover(self) -> None:
        """After a kill: put right what was on its way, see `training.unfinished`."""
        if (self.path / SAVING).is_dir():
            try:
                recover(self.path)
            except OSError as error:
                raise UserError(f"train.output_dir {self.path} cannot be written: {error.strerror}") from error

    @property
    def empty(self) -> bool:
        """Nothing in it, or only what a run writes before it trains."""
        names = {p.name.removesuffix(".tmp") for p in self.path.iterdir()} if self.path.is_dir() else set()
        return not names or (
            MARKER in names and names <= {MARKER, RECIPE, METRICS, HELD_OUT, SAVING} and not self.finished
        )

    def _require_resumable(self, recipe_yaml: str) -> None:
        if self.finished:
            raise UserError(f"{self.path} holds a finished run: there is nothing to resume")
        if not checkpoint_folders(self.path):  # killed before its first one, or not begun yet: it begins
            if not self.empty:
                self._require_replaceable(overwrite=True)
            return
        stored = self.path / RECIPE
        if stored.is_file() and (changed := changed_training(stored.read_text(encoding="utf-8"), recipe_yaml)):
            raise UserError(
                f"the recipe differs from the one {self.path} was started with, in {', '.join(changed)}: a resumed "
                "run must train the same thing. Restore these values, or start another run with train.output_dir=…"
            )
        if not self.checkpoints:
            raise UserError(self._nothing_whole(self.broken_checkpoints))

    def _require_replaceable(self, overwrite: bool) -> None:
        if not (self.path / MARKER).is_file():
            raise UserError(f"{self.path} is not empty and holds no run: choose another train.output_dir")
        if overwrite and Path.cwd().is_relative_to(self.path.resolve()):
            raise UserError(f"{self.path} is where this command runs, so it is not replaced: go elsewhere first")
        if overwrite:
            return
        choices = "--overwrite to replace it, or train.output_dir=… for another folder"
        if not self.finished and self.checkpoints:
            choices = f"--resume to go on from {self.checkpoints[-1].name}, {choices}"
        state = "a finished" if self.finished else "an unfinished"
        raise UserError(f"{self.path} holds {state} run: give {choices}")

    def settle(self) -> None:
        """Have the result on the disk, before anything says that it is there."""
        if self.writes:
            flush(*(path for path in self.path.iterdir() if step_of(path) < 0 and path.name != SAVING))
            sync(self.path)

    def update_metrics(self, **values: Any) -> dict[str, Any]:
        """Add to metrics.json and return all of it."""
        if not self.writes:
            return self.metrics | values
        return Record(self.path / METRICS).update(**values)


def changed_training(stored: str, given: str) -> list[str]:
    """The keys that decide what is trained and differ between two resolved recipes."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        before, now = YAML(typ="safe").load(stored), YAML(typ="safe").load(given)
        sections = ("model", "adapter", "data", "objective", "train")
        changed = [key for name in sections for key in _differing(before.get(name), now.get(name), name)]
        return [key for key in changed if key.removeprefix("train.") not in RESUMABLE]
    except (YAMLError, AttributeError, KeyError, TypeError):
        return [f"everything: the stored {RECIPE} is damaged"]


def _differing(before: Any, now: Any, name: str) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted(before.keys() | now.keys(), key=str)
        return [found for key in keys for found in _differing(before.get(key), now.get(key), f"{name}.{key}")]
    return [name] if before != now else []


def holds_last_step(checkpoint: Path) -> bool:
    """Whether nothing is left to train after a complete checkpoint."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return state["global_step"] >= state["max_steps"] > 0


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a crash in the middle leaves the old one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
