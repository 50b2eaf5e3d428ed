"""What run folders hold, as far as they hold it."""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..evaluation import Sample
from ..held_rows import HeldRows, kept_rows
from ..run_folder import FIGURES, MARKER, METRICS, RECIPE, Record
from ..scoring.score_rows import with_rows

# What `anyformer eval` leaves in a run folder, and a pipeline in its own.
SCORES, PIPELINE = "scores.json", "pipeline.json"


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: short, and no other run's of the comparison.
        recipe: resolved, as plain data.
        rows: `before` and `after` -> what each held-out row adds to the figures.
        history: the trainer's log, by step.
        scores: what `anyformer eval` left, each with the `digest` of its data and `by_row`, what rows add to it; None
            where that is not kept.
        remarks: what of it cannot be shown, and why.
    """

    name: str
    path: Path
    recipe: dict[str, Any]
    metrics: dict[str, Any]
    rows: dict[str, HeldRows] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    remarks: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Of its objective."""
        return str((self.recipe.get("objective") or {}).get("kind", "sft"))

    def figures(self, when: str) -> dict[str, float]:
        """The held-out figures `before` or `after` training; empty where none were measured."""
        return {name: value for name, value in (self.metrics.get(when) or {}).items() if _is_number(value)}

    @property
    def shown(self) -> list[str]:
        """Names of the figures in the order of the tables."""
        measured = (self.metrics.get("measured") or {}).get("shown")
        known = self.figures("after") or self.figures("before")
        return [name for name in measured or known if name in known and name not in ("rows", "tokens")]

    def samples(self, when: str) -> list[Sample]:
        return [Sample(**sample) for sample in self.metrics.get(f"samples_{when}") or []]


def read_runs(names: Sequence[Path]) -> list[Run]:
    """The runs in folders; a pipeline's folder stands for the runs of its stages.

    Raises:
        UserError: a folder that holds no run or damaged files, one run twice, fewer than two runs.
    """
    paths = [path for name in names for path in _run_folders(name)]
    seen: dict[Path, Path] = {}
    for path in paths:
        if (other := seen.setdefault(path.resolve(), path)) is not path:
            also = f" and as {path}" if path != other else ""
            raise UserError(f"{other} is named twice{also}: compare it with another run")
    if len(paths) < 2:
        which = f"{paths[0]} is only one" if paths else "none is given"
        raise UserError(f"a comparison needs two runs or more, and {which}: anyformer compare RUN RUN…")
    return [_read(name, path) for name, path in zip(_short_names(paths), paths, strict=True)]


def _run_folders(name: Path) -> list[Path]:
    path = name.expanduser()
    try:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise UserError(f"{name} {what}: give the folder of a run, which is its train.output_dir")
        if (path / RECIPE).is_file() or (path / METRICS).is_file():
            return [path]
        if (path / PIPELINE).is_file():
            if stages := list(_stages(path)):
                return stages
            raise UserError(f"{name} is the folder of a pipeline, and no stage of it has begun")
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from error
    if (path / MARKER).is_file():
        raise UserError(f"{name} holds a run that has not begun: there is nothing to compare yet")
    inside = [folder.name for folder in sorted(path.iterdir()) if (folder / RECIPE).is_file()]
    hint = f"; it holds runs: {', '.join(str(name / each) for each in inside[:5])}" if inside else ""
    raise UserError(f"{name} holds no run of `anyformer train`: there is no {RECIPE} and no {METRICS} in it{hint}")


def _stages(folder: Path) -> Iterator[Path]:
    """Folders of a pipeline's stages in their order, as far as they have begun and stand in the pipeline's own."""
    named = _stored(folder / PIPELINE).get("inputs") or {}
    if not isinstance(named, dict):
        raise UserError(f"{folder / PIPELINE} is damaged: its inputs are not under names of stages")
    inside = [path.name for path in sorted(folder.iterdir()) if (path / RECIPE).is_file()]
    for name in [*named, *(name for name in inside if name not in named)]:
        if name in inside:
            yield folder / name


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The fewest last parts of each path that tell all apart."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read(name: str, path: Path) -> Run:
    metrics = _metrics(path / METRICS)
    remarks, history = [], metrics.get("history") or []
    if not metrics.get("finished"):
        history = history or _logged(path / FIGURES)
        remarks.append(_unfinished(name, metrics, history))
    if not (path / RECIPE).is_file():
        remarks.append(f"{name} has no {RECIPE}: its recipe is not compared")
    run = Run(name, path, _recipe(path / RECIPE), metrics, kept_rows(path), history, _scores(path / SCORES))
    _check_samples(run)
    if run.shown and not run.rows:
        remarks.append(
            f"{name} keeps no figures of single held-out rows: its figures have no intervals and are subtracted from "
            "no other's"
        )
    return Run(**{**vars(run), "remarks": tuple(remarks)})


def _stored(file: Path) -> dict[str, Any]:
    """The values of a JSON file; none where there is no file."""
    try:
        values = Record(file).values
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except UserError as error:  # which tells whoever trains what to do
        raise UserError(
            f"{file} is damaged ({error.__cause__}): leave its folder out of the comparison, or train it again"
        ) from error
    if not isinstance(values, dict):
        raise UserError(f"{file} is damaged: it holds no values under names")
    return values


def _metrics(file: Path) -> dict[str, Any]:
    metrics = _stored(file)
    for name in ("before", "after", "measured", "plan", "training", "versions", "environment", "parallel"):
        if not isinstance(metrics.get(name) or {}, dict):
            raise UserError(f"{file} is damaged: its {name} holds no values under names")
    history = metrics.get("history") or []
    if not isinstance(history, list) or not all(map(_is_log, history)):
        raise UserError(f"{file} is damaged: its history is no list of logs by step")
    shown = (metrics.get("measured") or {}).get("shown") or []
    if not isinstance(shown, list) or not all(isinstance(name, str) for name in shown):
        raise UserError(f"{file} is damaged: its measured.shown is no list of names of figures")
    steps = (metrics.get("plan") or {}).get("steps") or 0
    if not _is_number(steps):
        raise UserError(f"{file} is damaged: its plan.steps is no number")
    return metrics


def _is_log(entry: Any) -> bool:
    return isinstance(entry, dict) and _is_finite(entry.get("step", 0))


def _unfinished(name: str, metrics: dict[str, Any], history: Sequence[dict[str, float]]) -> str:
    step = max((int(entry.get("step", 0)) for entry in history), default=0)
    total = (metrics.get("plan") or {}).get("steps")
    done = f" after step {step:,}" if step else " before its first logged step"
    if total:
        done += f" of {total:,}"
    return f"{name} is unfinished{done}: what it has so far is shown"


def _recipe(file: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not file.is_file():
        return {}
    try:
        found = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {_first_line(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} is damaged: it holds no recipe")
    if not isinstance(found.get("objective") or {}, dict):
        raise UserError(f"{file} is damaged: its objective is no section with a kind")
    return found


def _logged(file: Path) -> list[dict[str, float]]:
    """The rows of `metrics.csv` that are whole."""
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {_first_line(error)}") from error
    found = []
    for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
        values = {name: number for name, value in row.items() if (number := _number(value)) is not None}
        if "step" in values:
            found.append(values)
    return found


def _scores(file: Path) -> list[dict[str, Any]]:
    remedy = "remove it, or run `anyformer eval` again"
    try:
        stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"scores": []}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({_first_line(error)}): {remedy}") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("scores"), list):
        raise UserError(f"{file} is damaged (it holds no list of scores): {remedy}")
    for number, score in enumerate(stored["scores"], 1):
        if fault := _score_fault(score):
            raise UserError(f"{file} is damaged ({fault} of score {number}): {remedy}")
    digests = _digests(stored.get("data"))
    return with_rows(file.parent, [score | {"digest": digests.get(score.get("data"))} for score in stored["scores"]])


def _score_fault(score: Any) -> str | None:
    """Which value of a score is none, if there is one."""
    if not isinstance(score, dict):
        return "the values"
    checks = {
        "name": isinstance(score.get("name"), str),
        "data": isinstance(score.get("data") or "", str),
        "value": _is_number(score.get("value")),
        **{bound: bound in score and (score[bound] is None or _is_number(score[bound])) for bound in ("low", "high")},
        "count": _is_finite(score.get("count")),
        "settings": isinstance(score.get("settings") or {}, dict),
    }
    return next((name for name, sound in checks.items() if not sound), None)


def _digests(data: Any) -> dict[Any, str]:
    """The name of data -> the digest of their rows, as far as it is kept."""
    described = data.items() if isinstance(data, dict) else ()
    found = {name: of.get("digest") for name, of in described if isinstance(of, dict)}
    return {name: digest for name, digest in found.items() if isinstance(digest, str)}


def _check_samples(run: Run) -> None:
    try:
        samples = [sample for when in ("before", "after") for sample in run.samples(when)]
    except (TypeError, AttributeError) as error:
        raise UserError(f"{run.path / METRICS} is damaged ({_first_line(error)})") from error
    if not all(isinstance(text, str) for sample in samples for text in vars(sample).values()):
        raise UserError(f"{run.path / METRICS} is damaged: a sample's prompt, reference or answer is no text")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _first_line(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"no {said}" if isinstance(error, KeyError) else said.splitlines()[0]
