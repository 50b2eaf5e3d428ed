"""Pipelines: a folder of recipes, `1-sft.yaml`, `2-reward.yaml`, …, each of which may build on what earlier ones make.

In a stage's recipe `stage:NAME` stands for the output of the earlier stage NAME. All stages are read together, and all
that is wrong with any of them is said at once.
"""

import difflib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .adapters.bases import keeps_adapter
from .loading import (
    STAGE_FILE,
    ReadRecipe,
    RecipeError,
    find_pipeline,
    in_order,
    misnamed_stages,
    read_recipe,
    stage_files,
    stage_references,
)
from .run_folder import ADAPTER
from .schema import SECTIONS, ModelSection, Recipe
from .yaml_tree import STAGE, Place, Problem, dotted, locate, parse_value, plain, redact
from .yaml_tree import Path as KeyPath

# The keys in which a stage can be named.
REFERABLE = (
    ("model", "path"),
    ("model", "tokenizer"),
    ("adapter", "path"),
    ("objective", "reward"),
    ("objective", "teacher"),
)
# What the report calls the model that the first stage starts from.
BASE = "base"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# Heads whose weights another head can start from.
_LANGUAGE_MODELS = ("causal_lm", "masked_lm", "seq2seq_lm")


@dataclass(frozen=True)
class Stage:
    """One recipe of a pipeline.

    Attributes:
        name: of the file, without its number.
        recipe: as it is written, `stage:NAME` unresolved.
        inputs: names of the stages whose output it reads, in the order of the stages.
    """

    name: str
    file: Path
    recipe: Recipe
    inputs: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where the stage's run is kept."""
        return Path(self.recipe.train["output_dir"]).expanduser()


@dataclass(frozen=True)
class Pipeline:
    """Stages in their order. `folder` holds the report on all of them, and their runs unless they say otherwise."""

    name: str
    folder: Path
    stages: tuple[Stage, ...]

    def __getitem__(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def to_yaml(self) -> str:
        """All stages as they are written, one YAML document each."""
        return "".join(f"--- # {stage.file.name}\n{stage.recipe.to_yaml()}" for stage in self.stages)

    def resolved(self, stage: Stage) -> Recipe:
        """The stage's recipe with the folders of earlier stages in place of their names: it runs by itself."""
        return _with(stage.recipe, self._output)

    def _output(self, key: KeyPath, value: str) -> str:
        """What a value stands for where it names a stage: its folder, or the adapter in it; else the value as it is."""
        if not (name := _stage_in(value)):
            return value
        stage = self[name]
        inside = key == ("adapter", "path") and not keeps_adapter(stage.recipe)
        return str(stage.folder / ADAPTER if inside else stage.folder)

    def planned(self, stage: Stage, done: Sequence[str]) -> Recipe | None:
        """The stage's recipe before its inputs exist: what an earlier stage starts from has the same config, tokenizer
        and sizes as what it makes.

        Args:
            done: names of the stages whose outputs exist.

        Returns:
            None where nothing of the kind can stand in for an input.
        """
        recipe = _with(stage.recipe, functools.partial(self._output_of, done))
        if _stage_in(recipe.adapter.path):
            return None  # nobody knows yet what it will hold
        model = self._start(recipe.model, done)
        objective = recipe.objective
        if source := _stage_in(getattr(objective, "teacher", None)):
            teacher = self._start(self[source].recipe.model, done)
            if teacher.path is None or teacher.tokenizer is not None:
                return None  # a teacher is one folder, with its tokenizer
            objective = objective.model_copy(update={"teacher": teacher.path})
        return recipe.model_copy(update={"model": model, "objective": objective})

    def _output_of(self, done: Sequence[str], key: KeyPath, value: str) -> str:
        return self._output(key, value) if _stage_in(value) in done else value

    def _start(self, model: ModelSection, done: Sequence[str]) -> ModelSection:
        """A `model` section with what stages that are not done start from in place of what they make."""
        known = {key: getattr(model, key) for key in ("path", "tokenizer")}
        model = model.model_copy(update={k: v and self._output_of(done, ("model", k), v) for k, v in known.items()})
        if source := _stage_in(model.path):
            start = self._start(self[source].recipe.model, done)
            same = {name: getattr(start, name) for name in ("path", "preset", "revision")}
            other = {
                "config": start.config | model.config,
                "tokenizer": model.tokenizer or start.tokenizer,
                "context_extension": model.context_extension or start.context_extension,
            }
            model = model.model_copy(update=same | other)
        if source := _stage_in(model.tokenizer):
            start = self._start(self[source].recipe.model, done)
            model = model.model_copy(update={"tokenizer": start.tokenizer or start.path})
        return model


def _stage_in(value: Any) -> str:
    """The name in `stage:NAME`, or nothing."""
    return value.removeprefix(STAGE) if isinstance(value, str) and value.startswith(STAGE) else ""


def _with(recipe: Recipe, change: Callable[[KeyPath, str], str]) -> Recipe:
    """The recipe with each value that can name a stage changed."""
    sections: dict[str, Any] = {}
    for section, key in REFERABLE:
        part = sections.get(section, getattr(recipe, section))
        value = getattr(part, key, None)
        if value is not None:
            path = (section, key)
            new = [change(path, item) for item in value] if isinstance(value, list) else change(path, value)
            sections[section] = part.model_copy(update={key: new})
    return recipe.model_copy(update=sections)


# Reading


def load_pipeline(path: str | Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Read the stages of a pipeline.

    Args:
        path: a folder with numbered recipes, or the name of a shipped pipeline.
        overrides: `STAGE.a.b=c` changes one stage, `a.b=c` every stage, as `load_recipe` describes; `train.output_dir`
            without a stage is the pipeline's folder, in which each stage has its own.

    Raises:
        RecipeError: all that is wrong with any stage, each with file, line and the full path of its key.
    """
    folder = find_pipeline(str(path))
    if folder is None:
        raise RecipeError([Problem(Place(redact(str(path))), "", "no such pipeline: a folder with 1-NAME.yaml, …")])
    reader = _Reader(folder, overrides)
    pipeline = reader.read()
    if reader.problems or pipeline is None:
        raise RecipeError(in_order(reader.problems, reader.files))
    return pipeline


class _Reader:
    """Reads all stages of a folder and gathers what is wrong with them."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        name = folder.resolve().name
        self.name, self.output = name, Path("runs") / name
        self.problems: list[Problem] = []
        self.files: list[str] = []
        self.sources = dict(self.named(folder))
        self.overrides = dict(zip(self.sources, self.addressed(overrides), strict=True)) if self.sources else {}

    def named(self, folder: Path) -> Iterator[tuple[str, Path]]:
        """(name, file) of each stage whose file has a usable name."""
        numbers: dict[int, str] = {}
        names: dict[str, str] = {}
        for file in misnamed_stages(folder):
            self.fault(
                Place(str(file)), "begins with a number but is no stage: call it NUMBER-NAME.yaml, as 2-reward.yaml"
            )
        for file in stage_files(folder):
            match = STAGE_FILE.fullmatch(file.name)
            assert match is not None
            number, name = int(match[1]), match[2]
            if number in numbers:
                self.fault(Place(str(file)), f"has the number of {numbers[number]}: which of them comes first?")
            if not _NAME.fullmatch(name) or name in (*SECTIONS, "extends", BASE):
                said = "the name of a section" if name in SECTIONS else "no name"
                if name == BASE:
                    said = "what the report calls the model that the first stage starts from"
                self.fault(Place(str(file)), f"{name!r} is {said}: call the stage by letters, digits, '-' and '_'")
            elif name in names:
                self.fault(Place(str(file)), f"is called as {names[name]}: every stage has a name of its own")
            else:
                yield name, file
            numbers.setdefault(number, file.name)
            names.setdefault(name, file.name)

    def fault(self, place: Place, text: str, path: str = "") -> None:
        self.problems.append(Problem(place, path, text))

    def addressed(self, overrides: Sequence[str]) -> list[list[tuple[str, str]]]:
        """For each stage the overrides that it gets, as they are applied and as they were given."""
        found: dict[str, list[tuple[str, str]]] = {name: [] for name in self.sources}
        for text in overrides:
            removes = text.startswith("~")
            first, _, rest = text.removeprefix("~").partition(".")
            name = text.partition("=")[0].strip()
            if first in found:
                found[first].append((f"{'~' if removes else ''}{rest}", text))
            elif name == "train.output_dir":
                self.move(text)
            elif first.partition("=")[0].strip() not in (*SECTIONS, "extends") and ("=" in text or removes):
                near = difflib.get_close_matches(first, [*found, *SECTIONS], n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                known = f"stages: {', '.join(found)}; sections: {', '.join(SECTIONS)}"
                self.fault(Place(f"override {redact(text)!r}"), f"begins with no stage and no section. {hint}{known}")
            else:
                for given in found.values():
                    given.append((text, text))
        return list(found.values())

    def move(self, text: str) -> None:
        """`train.output_dir=…` for all stages: the pipeline's folder."""
        place = Place(f"override {redact(text)!r}")
        node, problems = parse_value(text.partition("=")[2].strip(), place)
        self.problems += problems
        value = None if node is None else plain(node)
        if isinstance(value, str) and value:
            self.output = Path(value)
        elif not problems:
            self.fault(place, "must be the folder of the whole pipeline; STAGE.train.output_dir sets that of one stage")

    def read(self) -> Pipeline | None:
        """The pipeline, or None where a recipe is faulty in itself."""
        read: dict[str, ReadRecipe] = {}
        for name, file in self.sources.items():
            recipe = read_recipe(file, self.overrides[name], output_dir=str(self.output / name))
            # An override without a stage's name may suit one stage and not another: say whose it is.
            for problem in recipe.problems:
                everywhere = problem.place.line == 0 and problem.place.file.startswith("override ")
                path = f"{name}.{problem.path}" if everywhere and problem.path else problem.path
                self.problems.append(problem._replace(path=path))
            self.files += [shown for shown in recipe.files if shown not in self.files]
            self.problems += self.references(name, recipe, read)
            read[name] = recipe
        if any(item.recipe is None for item in read.values()):
            return None
        self.problems += [*_folders(self.output.expanduser(), read), *_repositories(read)]
        stages = [
            Stage(name, self.sources[name], item.recipe, _inputs(item, list(read)))
            for name, item in read.items()
            if item.recipe is not None
        ]
        return Pipeline(self.name, self.output.expanduser(), tuple(stages))

    def references(self, name: str, recipe: ReadRecipe, before: dict[str, ReadRecipe]) -> Iterator[Problem]:
        """What is wrong with the stages that a recipe names."""
        for path, value in stage_references(recipe.data):
            wanted = value.removeprefix(STAGE)
            if path[:2] not in REFERABLE:
                text = f"cannot name a stage; these can: {', '.join(map(dotted, REFERABLE))}"
            elif wanted in before:
                text = _unsuited(path, wanted, before[wanted].recipe, recipe.recipe)
            else:
                text = self.unknown(name, wanted, list(before))
            if text:
                yield Problem(locate(recipe.root, path), dotted(path), f"{value} {text}")

    def unknown(self, name: str, wanted: str, before: list[str]) -> str:
        there = f"stages before {name}: {', '.join(before)}" if before else f"{name} is the first stage"
        if wanted == name:
            return f"is this stage itself; {there}"
        if wanted in self.sources:
            return f"comes later; {there}"
        near = difflib.get_close_matches(wanted, before, n=1)
        return f"names no stage; {f'did you mean {near[0]!r}? ' if near else ''}{there}"


def _inputs(recipe: ReadRecipe, order: list[str]) -> tuple[str, ...]:
    wanted = {value.removeprefix(STAGE) for _, value in stage_references(recipe.data)}
    return tuple(name for name in order if name in wanted)


def _unsuited(path: KeyPath, name: str, source: Recipe | None, user: Recipe | None) -> str:
    """Why a stage's output cannot stand where it is named; nothing where it can, or where that cannot be judged."""
    from .objectives import objective_class

    if source is None:
        return ""
    kind, head = source.objective.kind, objective_class(source.objective.kind).head
    if path[:2] == ("objective", "reward"):
        if kind != "reward":
            return f"trains with the objective {kind}, which makes no reward model"
    elif path[:2] in (("model", "path"), ("objective", "teacher")):
        if keeps_adapter(source):
            return f"keeps its adapter apart from its base: merge it in {name} (adapter.merge)"
        wanted = objective_class(user.objective.kind).head if user else head
        if head not in (*_LANGUAGE_MODELS, wanted):
            return f"makes a {head} model, and the objective {user.objective.kind if user else ''} needs a {wanted}"
    elif path[:2] == ("adapter", "path") and user:
        return _unsuited_adapter(source, user)
    return ""


def _unsuited_adapter(source: Recipe, user: Recipe) -> str:
    """Why a stage cannot go on from the adapter of another; nothing where it can."""
    held, wanted = source.adapter, user.adapter
    if held.in_place:
        return f"trains its weights in place (adapter.kind: {held.kind}), so it makes no adapter"
    if held.kind != wanted.kind:
        return f"makes an adapter of kind {held.kind}, and this one is {wanted.kind}: write kind: {held.kind}"
    if source.model.path != user.model.path:
        return f"makes an adapter for {source.model.path}: model.path must be that too, not {user.model.path}"
    before = held.arguments()
    other = sorted(key for key, value in wanted.arguments().items() if value != before.get(key))
    return f"makes an adapter that decides {', '.join(other)} itself: leave that out" if other else ""


def _folders(pipeline: Path, read: dict[str, ReadRecipe]) -> Iterator[Problem]:
    """Each run is in a folder of its own, and reads what others write under their names."""
    here: KeyPath = ("train", "output_dir")
    folders = {name: Path(item.data["train"]["output_dir"]).expanduser().resolve() for name, item in read.items()}
    for name, item in read.items():
        folder, place = folders[name], locate(item.root, here)
        if pipeline.resolve().is_relative_to(folder):
            yield Problem(place, dotted(here), f"{folder} holds the whole pipeline: give {name} a folder of its own")
        for other, taken in folders.items():
            if other == name:
                break
            if folder.is_relative_to(taken) or taken.is_relative_to(folder):
                text = f"stages {other} and {name} would write into one folder, {folder}: give each its own"
                yield Problem(place, dotted(here), text)
        for path, value in _paths(item.data):
            for other, written in folders.items():
                if other != name and Path(value).expanduser().resolve().is_relative_to(written):
                    text = f"{value} is what stage {other} writes: name it {STAGE}{other}"
                    yield Problem(locate(item.root, path), dotted(path), text)


def _repositories(read: dict[str, ReadRecipe]) -> Iterator[Problem]:
    pushed: dict[tuple[str, str | None], str] = {}
    for name, item in read.items():
        hub = item.recipe.hub if item.recipe else None
        if hub is None:
            continue
        other = pushed.setdefault((hub.repo, hub.revision), name)
        if other != name:
            text = f"stages {other} and {name} would push to one repository, {hub.repo}: give each its own"
            yield Problem(locate(item.root, ("hub", "repo")), "hub.repo", text)


def _paths(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """What a recipe reads from the keys that can name a stage."""
    for section, key in REFERABLE:
        value = (data.get(section) or {}).get(key)
        for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(item, str) and item and not item.startswith((STAGE, "package:")):
                yield (section, key) if index is None else (section, key, index), item
