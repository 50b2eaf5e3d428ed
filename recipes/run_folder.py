"""The folder of one run: a model repository, with the recipe, the figures and the checkpoints beside the weights."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from .errors import UserError

RECIPE, METRICS = "recipe.yaml", "metrics.json"
ADAPTER = "adapter"


class RunFolder:
    """Reads and writes what a run keeps; nothing of an earlier run is lost unless the user says so."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        found = [p for p in self.path.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit()]
        return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")))

    @property
    def metrics(self) -> dict[str, Any]:
        path = self.path / METRICS
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @property
    def finished(self) -> bool:
        return "after" in self.metrics

    def check(self, recipe_yaml: str, *, resume: bool, overwrite: bool) -> None:
        """Make sure that the run may use the folder; nothing is changed.

        Raises:
            UserError: it holds a run and neither `resume` nor `overwrite` is given; there is nothing to resume; the
                recipe to resume with describes other training.
        """
        if resume and overwrite:
            raise UserError("--resume and --overwrite contradict each other: give one of them")
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; train.output_dir must be a folder")
        if resume:
            self._require_resumable(recipe_yaml)
        elif not self._empty:
            self._require_replaceable(overwrite)

    def open(self, recipe_yaml: str, *, resume: bool) -> None:
        """Begin to write: clear the folder unless a run goes on, and store the recipe. Call `check` first.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            if not resume and self.path.is_dir():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.path / RECIPE, recipe_yaml)
        except OSError as error:
            raise UserError(f"train.output_dir {self.path} cannot be written: {error.strerror}") from error

    @property
    def _empty(self) -> bool:
        """Nothing in it, or only what a run writes before it trains."""
        names = {p.name for p in self.path.iterdir()} if self.path.is_dir() else set()
        return not names or (RECIPE in names and names <= {RECIPE, METRICS} and not self.finished)

    def _require_resumable(self, recipe_yaml: str) -> None:
        if self.finished:
            raise UserError(f"{self.path} holds a finished run: there is nothing to resume")
        if not self.checkpoints:
            raise UserError(
                f"{self.path} holds no checkpoint to resume from. Leave out --resume; to have checkpoints, set "
                "train.save_steps below the number of steps"
            )
        stored = self.path / RECIPE
        if stored.is_file() and (changed := _changed_training(stored.read_text(encoding="utf-8"), recipe_yaml)):
            raise UserError(
                f"the recipe differs from the one {self.path} was started with, in {', '.join(changed)}: a resumed "
                "run must train the same thing. Restore these values, or start another run with train.output_dir=…"
            )

    def _require_replaceable(self, overwrite: bool) -> None:
        if not (self.path / RECIPE).is_file():
            raise UserError(f"{self.path} is not empty and holds no run: choose another train.output_dir")
        if overwrite:
            return
        choices = "--overwrite to replace it, or train.output_dir=… for another folder"
        if not self.finished and self.checkpoints:
            choices = f"--resume to go on from {self.checkpoints[-1].name}, {choices}"
        state = "a finished" if self.finished else "an unfinished"
        raise UserError(f"{self.path} holds {state} run: give {choices}")

    def update_metrics(self, **values: Any) -> dict[str, Any]:
        """Add to metrics.json and return all of it."""
        metrics = self.metrics | values
        write_text(self.path / METRICS, json.dumps(metrics, indent=2, ensure_ascii=False) + "\n")
        return metrics


def _changed_training(stored: str, given: str) -> list[str]:
    """Sections that decide what is trained and that differ between two resolved recipes."""
    from ruamel.yaml import YAML

    before, now = YAML(typ="safe").load(stored), YAML(typ="safe").load(given)
    return [name for name in ("model", "adapter", "data", "objective") if before.get(name) != now.get(name)]


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a crash in the middle leaves the old one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
