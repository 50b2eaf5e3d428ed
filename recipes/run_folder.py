"""The folder of one run: a model repository, with the recipe, the figures and the checkpoints beside the weights."""

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

from .errors import UserError

RECIPE, METRICS = "recipe.yaml", "metrics.json"
FIGURES = "metrics.csv"
ADAPTER = "adapter"
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

    @property
    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return [p for p in self._checkpoint_folders if not missing_part(p)]

    @property
    def broken_checkpoints(self) -> list[tuple[Path, str]]:
        """Checkpoints that cannot be resumed from, as after a kill while they were written, and what is wrong."""
        return [(p, part) for p in self._checkpoint_folders if (part := missing_part(p))]

    @property
    def _checkpoint_folders(self) -> list[Path]:
        found = [p for p in self.path.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit()]
        return sorted((p for p in found if p.is_dir()), key=lambda p: int(p.name.removeprefix("checkpoint-")))

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
            UserError: it holds a run and neither `resume` nor `overwrite` is given; there is nothing to resume; the
                recipe to resume with describes other training.
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

    def open(self, recipe_yaml: str, *, resume: bool) -> None:
        """Begin to write: clear the folder unless a run goes on, and store the recipe. Call `check` first.

        Raises:
            UserError: the folder cannot be written.
        """
        if not self.writes:
            return
        try:
            if not resume:
                self.clear()
            self.path.resolve().mkdir(parents=True, exist_ok=True)
            (self.path / MARKER).touch()
            write_text(self.path / RECIPE, recipe_yaml)
        except OSError as error:
            raise UserError(f"train.output_dir {self.path} cannot be written: {error.strerror}") from error

    def clear(self) -> None:
        """Remove the run, where the folder holds one; a link to the folder stays."""
        if (self.path / MARKER).is_file():
            shutil.rmtree(self.path.resolve())

    @property
    def empty(self) -> bool:
        """Nothing in it, or only what a run writes before it trains."""
        names = {p.name for p in self.path.iterdir()} if self.path.is_dir() else set()
        return not names or (MARKER in names and names <= {MARKER, RECIPE, METRICS} and not self.finished)

    def _require_resumable(self, recipe_yaml: str) -> None:
        if self.finished:
            raise UserError(f"{self.path} holds a finished run: there is nothing to resume")
        stored = self.path / RECIPE
        if stored.is_file() and (changed := changed_training(stored.read_text(encoding="utf-8"), recipe_yaml)):
            raise UserError(
                f"the recipe differs from the one {self.path} was started with, in {', '.join(changed)}: a resumed "
                "run must train the same thing. Restore these values, or start another run with train.output_dir=…"
            )
        if not self.checkpoints:
            broken = "; ".join(f"{p.name}: {part}" for p, part in self.broken_checkpoints)
            raise UserError(
                f"{self.path} holds no checkpoint to resume from{f' ({broken})' if broken else ''}. "
                "Leave out --resume; to have checkpoints, set train.save_steps below the number of steps"
            )

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

    def update_metrics(self, **values: Any) -> dict[str, Any]:
        """Add to metrics.json and return all of it."""
        if not self.writes:
            return self.metrics | values
        return Record(self.path / METRICS).update(**values)


def changed_training(stored: str, given: str) -> list[str]:
    """What decides what is trained and differs between two resolved recipes."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        before, now = YAML(typ="safe").load(stored), YAML(typ="safe").load(given)
        changed = [name for name in ("model", "adapter", "data", "objective") if before.get(name) != now.get(name)]
        keys = (set(before["train"]) | set(now["train"])) - RESUMABLE
        return changed + sorted(f"train.{k}" for k in keys if before["train"].get(k) != now["train"].get(k))
    except (YAMLError, AttributeError, KeyError, TypeError):
        return [f"everything: the stored {RECIPE} is damaged"]


def missing_part(checkpoint: Path) -> str:
    """What a checkpoint lacks to be resumed from exactly; empty where it is complete."""
    from safetensors import SafetensorError, safe_open

    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "trainer_state.json is missing or damaged"
    if (checkpoint / "pytorch_model_fsdp_0").is_dir():
        return ""
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        paths = list(checkpoint.glob(name.replace(".pth", "*.pth")))
        if not paths or not all(zipfile.is_zipfile(path) for path in paths):
            return f"{name} is missing or damaged"
    weights = [p for p in checkpoint.glob("*.safetensors") if p.name.startswith(("model", "adapter_model"))]
    try:
        for path in weights:
            with safe_open(path, framework="np"):
                pass
    except (OSError, SafetensorError):
        return f"{path.name} is damaged"
    return "" if weights else "the weights are missing"


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
