"""From a recipe's file, what it extends and the command line's overrides to a checked `Recipe`."""

import difflib
import importlib.resources
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from . import checks
from .errors import UserError
from .schema import KINDS, Recipe, architecture_model, kind_in
from .yaml_tree import (
    MAX_BYTES,
    STAGE,
    Node,
    Place,
    Problem,
    apply_override,
    dotted,
    kind_of,
    locate,
    merge,
    plain,
    read_yaml,
    redact,
)
from .yaml_tree import Path as KeyPath

_SUFFIXES = (".yaml", ".yml")
# The name of a stage's file in a pipeline's folder: the order, and the stage's name.
STAGE_FILE = re.compile(r"(\d+)-([^.]+)\.ya?ml")


class RecipeError(UserError):
    """Everything that is wrong with a recipe or a preset, one line a mistake.

    Attributes:
        problems: the mistakes, in the order of the files and lines they stand in.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        # Whatever a message quotes, it quotes no access token.
        self.problems = tuple(p._replace(path=redact(p.path), message=redact(p.message)) for p in problems)
        super().__init__("\n".join(map(str, self.problems)))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: a YAML file, or the name of a shipped recipe such as `quickstart`.
        overrides: `a.b=c` sets a key (the value is YAML), `a.list.0=c` an item, `~a.b` removes a key.

    Raises:
        RecipeError: all that is wrong, each with file, line and the full path of its key.
    """
    file = _find(str(path), "recipes")
    read = read_recipe(file, [(text, text) for text in overrides], output_dir=f"runs/{file.stem}")
    for where, value in stage_references(read.data):
        text = f"names a stage ({value}), but {file.name} is read by itself: train its folder, or give a path"
        read.problems.append(Problem(locate(read.root, where), dotted(where), text))
    if read.problems or read.recipe is None:
        raise RecipeError(in_order(read.problems, read.files))
    return read.recipe


@dataclass
class ReadRecipe:
    """A recipe as far as it can be read.

    Attributes:
        recipe: None if there are problems.
        problems: all that is wrong, in the order it was found.
        files: the recipe's file and all that it extends.
        root, data: its keys, with and without the places they stand in.
    """

    recipe: Recipe | None
    problems: list[Problem]
    files: list[str]
    root: Node = field(default_factory=lambda: Node({}, Place("")))
    data: dict[str, Any] = field(default_factory=dict)


def read_recipe(file: Path, overrides: Sequence[tuple[str, str]], *, output_dir: str) -> ReadRecipe:
    """Read a recipe's file and check it by itself.

    Args:
        overrides: each as it is to be applied and as it was given.
        output_dir: where the recipe names none.
    """
    composer = _Composer()
    root = composer.compose(file, ())
    if root is None:
        return ReadRecipe(None, composer.problems, composer.files)
    return _checked(root, overrides, composer.problems, composer.files, output_dir)


def recipe_of_text(text: str, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe that stands in no file.

    Args:
        name: for messages.

    Raises:
        RecipeError: what is wrong with it, or with an override.
    """
    root, problems = read_yaml(text.encode(), name)
    assert root is not None
    read = _checked(root, [(given, given) for given in overrides], problems, [name], "runs/plan")
    if read.recipe is None:
        raise RecipeError(in_order(read.problems, read.files))
    return read.recipe


def _checked(
    root: Node, overrides: Sequence[tuple[str, str]], problems: list[Problem], files: list[str], output_dir: str
) -> ReadRecipe:
    for text, given in overrides:
        problems += apply_override(root, text, _dropped, given=given)
    data = plain(root)
    train = {} if data.get("train") is None else data["train"]
    if isinstance(train, dict) and train.get("output_dir") is None:
        data["train"] = {**train, "output_dir": output_dir}
    recipe, faults = checks.check(data)
    problems += [Problem(locate(root, where), dotted(where), text) for where, text in faults]
    model = data.get("model")
    if isinstance(model, dict) and isinstance(preset := model.get("preset"), str):
        problems += _preset_problems(preset, locate(root, ("model", "preset")))
    return ReadRecipe(None if problems else recipe, problems, files, root, data)


def stage_references(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every `stage:NAME` in plain data, with the path of its key."""
    if isinstance(value, str) and value.startswith(STAGE):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from stage_references(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from stage_references(child, (*path, index))


def load_preset(name: str | Path) -> dict[str, Any]:
    """Read an architecture preset.

    Args:
        name: a shipped preset such as `tiny`, or a YAML file.

    Returns:
        Keyword arguments for `AnyformerConfig`.

    Raises:
        RecipeError: no such preset, a key that is no field of AnyformerConfig, or a value of the wrong type.
    """
    file = _find(str(name), "models")
    root, problems = _read(file)
    if root is None:
        raise RecipeError(problems)
    data = plain(root)
    try:
        architecture_model().model_validate(data)
    except ValidationError as error:
        faults = checks.explain(error, data, architecture_model())
        problems += [Problem(locate(root, where), dotted(where), text) for where, text in faults]
    if problems:
        raise RecipeError(in_order(problems, [_shown(file)]))
    return data


def shipped(folder: str) -> dict[str, Path]:
    """The YAML files of the package's configs that stand by themselves, so not those in a pipeline's folder.

    Args:
        folder: `recipes` or `models`.

    Returns:
        Name without suffix -> file.
    """
    inside = set(shipped_pipelines().values())
    return {name: file for name, file in _shipped_files(folder).items() if file.parent not in inside}


def shipped_pipelines() -> dict[str, Path]:
    """The pipelines of the package's configs: name -> folder of stages."""
    root, files = _shipped_root("recipes"), _shipped_files("recipes").values()
    folders = {file.parent for file in files if STAGE_FILE.fullmatch(file.name)} - {root}
    return {folder.relative_to(root).as_posix(): folder for folder in sorted(folders)}


def stage_files(folder: Path) -> list[Path]:
    """The files of a folder that are stages of a pipeline, by number."""
    found = [(match, file) for file in sorted(folder.iterdir()) if (match := STAGE_FILE.fullmatch(file.name))]
    return [file for match, file in sorted(found, key=lambda item: int(item[0][1]))]


def misnamed_stages(folder: Path) -> list[Path]:
    """YAML files that a number begins and that are no stages, by a slip in the rest of the name."""
    yaml = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in (".yaml", ".yml")]
    return [file for file in yaml if file.name[:1].isdigit() and not STAGE_FILE.fullmatch(file.name)]


def find_pipeline(name: str) -> Path | None:
    """The folder of stages that a name means: a folder with numbered files, or a shipped pipeline; None if neither.

    Raises:
        RecipeError: it cannot be looked into.
    """
    folder = Path(name).expanduser()
    try:
        if name.strip() and folder.is_dir() and stage_files(folder):
            return folder
        taken = name.strip() and folder.exists() and not folder.is_dir()
    except (OSError, ValueError) as error:
        raise RecipeError([Problem(Place(redact(name)), "", f"cannot be opened: {_reason(error)}")]) from None
    return None if taken else shipped_pipelines().get(folder.as_posix().removeprefix("configs/recipes/"))


def copy_shipped(name: str, target: Path) -> Path:
    """Copy a shipped recipe or preset to a file, or into a folder under its own name; a pipeline to a new folder.

    What it extends stays where it is: a shipped recipe is found by its name from anywhere.

    Returns:
        What was written: the file, or the pipeline's folder.

    Raises:
        RecipeError: nothing of that name is shipped; names the near ones.
        UserError: the file exists, or cannot be written.
    """
    pipelines = shipped_pipelines()
    known = {**shipped("models"), **shipped("recipes"), **pipelines}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"shipped: {', '.join(known)}"
        raise UserError(f"{name!r} is no shipped recipe or preset; {hint}")
    if name in pipelines:
        return _copy_pipeline(pipelines[name], target / Path(name).name if target.is_dir() else target)
    file = target / Path(name).with_suffix(".yaml").name if target.is_dir() else target
    _copy(known[name], file)
    return file


def _copy_pipeline(source: Path, folder: Path) -> Path:
    try:
        folder.mkdir()
    except FileExistsError:
        raise UserError(f"{folder} exists already: nothing is overwritten") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error
    for file in sorted(source.iterdir()):
        if file.suffix in _SUFFIXES:
            _copy(file, folder / file.name)
    return folder


def _copy(source: Path, file: Path) -> None:
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{file} exists already: nothing is overwritten") from None
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error


def describe(file: Path) -> str:
    """The first comment line of a YAML file, or nothing."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.strip():
            return line.strip().lstrip("# ").strip() if line.lstrip().startswith("#") else ""
    return ""


def _preset_problems(name: str, place: Place) -> Iterator[Problem]:
    try:
        load_preset(name)
    except RecipeError as error:
        for problem in error.problems:
            # A missing preset is the recipe's mistake, a bad key in one the preset's.
            found = problem.place.line > 0
            yield problem if found else Problem(place, "model.preset", str(problem))


def in_order(problems: Sequence[Problem], files: Sequence[str]) -> list[Problem]:
    """Each problem once, in the order of the files and lines."""
    order = {file: index for index, file in enumerate(files)}
    unique = list(dict.fromkeys(problems))
    return sorted(unique, key=lambda problem: (order.get(problem.place.file, len(order)), problem.place.line))


# Files


def _shipped_root(folder: str) -> Path:
    return Path(str(importlib.resources.files("anyformer.configs"))) / folder


def _shipped_files(folder: str) -> dict[str, Path]:
    root = _shipped_root(folder)
    files = sorted(file for file in root.rglob("*") if file.suffix in _SUFFIXES)
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in files}


def _find(name: str, folder: str, beside: Path | None = None) -> Path:
    """The file that a name means: a path, relative to `beside` or the working directory, or a shipped file's name.

    Raises:
        RecipeError: there is no such file; names the near ones.
    """
    place = Place(redact(name) or "(empty)")
    candidate = (beside or Path()) / Path(name).expanduser() if name.strip() else None
    kind = "recipe" if folder == "recipes" else "preset"
    try:
        if candidate is not None and candidate.exists() and not candidate.is_dir():
            return candidate
        files = _shipped_files(folder)
        short = Path(name).as_posix().removeprefix(f"configs/{folder}/")
        short = short.removesuffix(".yaml").removesuffix(".yml")
        if short in files:
            return files[short]
        if candidate is not None and candidate.is_dir():
            inside = sorted(str(f) for f in candidate.iterdir() if f.suffix in _SUFFIXES)
            hint = f"; in it: {', '.join(inside[:8])} (a pipeline's files are numbered: 1-NAME.yaml)" if inside else ""
            raise RecipeError([Problem(place, "", f"is a folder: name a {kind} file{hint}")])
        known = [*shipped(folder), *(shipped_pipelines() if folder == "recipes" else ())]
        near = difflib.get_close_matches(short, known, n=3)
        if candidate is not None and candidate.parent.is_dir():
            beside_it = {f.name: str(f) for f in candidate.parent.iterdir() if f.suffix in _SUFFIXES}
            near += [beside_it[match] for match in difflib.get_close_matches(candidate.name, beside_it, n=3)]
    except (OSError, ValueError) as error:
        raise RecipeError([Problem(place, "", f"cannot be opened: {_reason(error)}")]) from None
    if "=" in name and beside is None:
        raise RecipeError([Problem(place, "", "looks like an override: the recipe comes first, overrides follow it")])
    if near:
        hint = f"did you mean {' or '.join(dict.fromkeys(near))}?"
    else:
        hint = f"shipped {kind}s: {', '.join(known)}" if known else f"no {kind} is shipped"
    raise RecipeError([Problem(place, "", f"no such {kind}; {hint}")])


def _shown(file: Path) -> str:
    try:
        return str(file.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(file)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _read(file: Path) -> tuple[Node | None, list[Problem]]:
    """A file's tree, with a mapping at the top."""
    name = _shown(file)
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        return None, [Problem(Place(name), "", f"cannot be read: {_reason(error)}")]
    if len(raw) > MAX_BYTES:
        return None, [Problem(Place(name), "", f"is larger than {MAX_BYTES // 1024} kB: is this a YAML recipe?")]
    root, problems = read_yaml(raw, name)
    if root is None:
        return None, problems or [Problem(Place(name, 1), "", "the file is empty: it sets no key")]
    if not isinstance(root.value, dict):
        text = f"must hold a mapping (key: value) at the top, found {kind_of(root.value)}"
        return None, [*problems, Problem(root.place, "", text)]
    return root, problems


class _Composer:
    """Reads a recipe and all that it extends."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.files: list[str] = []

    def compose(self, file: Path, chain: tuple[Path, ...]) -> Node | None:
        """The recipe's tree laid over those of its parents, the last parent on top; None if it cannot be read."""
        self.files.append(_shown(file))
        root, problems = _read(file)
        self.problems += problems
        if root is None:
            return None
        chain = (*chain, file.resolve())
        below: Node | None = None
        extends = root.value.pop("extends", None)
        for path, parent in self.parents(extends, file) if extends else ():
            if parent.resolve() in chain:
                loop = " -> ".join(f.name for f in (*chain, parent))
                self.problems.append(Problem(locate(extends, path[1:]), dotted(path), f"goes in a circle: {loop}"))
                continue
            tree = self.compose(parent, chain)
            if tree is not None:
                below = tree if below is None else merge(below, tree, _dropped)
        return root if below is None else merge(below, root, _dropped)

    def parents(self, extends: Node, file: Path) -> Iterator[tuple[KeyPath, Path]]:
        value = plain(extends)
        if value is None:
            return
        names = [(("extends",), value)]
        if isinstance(value, list):
            names = [(("extends", index), name) for index, name in enumerate(value)]  # type: ignore[misc]
        for path, name in names:
            place = locate(extends, path[1:])
            if not isinstance(name, str):
                text = f"must be a recipe file or a list of them, found {kind_of(name)}"
                self.problems.append(Problem(place, dotted(path), text))
                continue
            try:
                yield path, _find(name, "recipes", beside=file.parent)
            except RecipeError as error:
                self.problems += [Problem(place, dotted(path), str(problem)) for problem in error.problems]


def _dropped(path: KeyPath, parent: Node, child: Node) -> set[str]:
    """Keys of a parent's section that make no sense once a child changes the section's `kind`."""
    if len(path) != 1 or path[0] not in KINDS or "kind" not in child.value:
        return set()
    section = str(path[0])
    old, new = (kind_in(section, plain(node)) for node in (parent, child))
    if old == new or new not in KINDS[section]:
        return set()
    before, after = (set(checks.known_keys(path, {section: {"kind": kind}})) for kind in (old, new))
    return before - after
