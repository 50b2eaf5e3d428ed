"""Every mistake in a recipe at once: the schema's findings in plain words, and what no single section can see."""

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from . import schema
from .cross_checks import across
from .schema import KINDS, SECTIONS, Recipe
from .yaml_tree import TOKEN, Path, show

Fault = tuple[Path, str]

# Names that other tools, older releases or habit give to a key, where no similarity of letters leads to it.
_KNOWN_AS = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "warmup_ratio": "warmup_steps (a value below 1 is a share of all steps)",
    "scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "no_cuda": "use_cpu",
    "rank": "r",
    "lora_r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "model_name_or_path": "path",
    "dataset": "source",
    "rope_theta": "rope_parameters: {rope_theta: ...}",
    "rope_scaling": "rope_parameters: {rope_type: ..., factor: ...}",
    "torch_dtype": "dtype",
}


def check(data: dict[str, Any]) -> tuple[Recipe | None, list[Fault]]:
    """Check a recipe's plain data.

    Returns:
        The recipe, or None if there are faults; and each fault as (path of the key, what is wrong and what is right).
    """
    recipe, faults = None, []
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        faults = explain(error, data)
    reported = {path for path, _ in faults}
    # A combination is judged only where its parts are sound.
    faults += [(path, text) for path, text in across(data, reported) if not any(path[: len(p)] == p for p in reported)]
    told = {path for path, text in faults if "HF_TOKEN" in text}
    faults += [(path, _TOKEN_FOUND) for path in _tokens(data, ()) if path not in told]
    return (None, faults) if faults else (recipe, [])


_TOKEN_FOUND = "holds an access token: tokens belong into the environment (HF_TOKEN, or `hf auth login`)"


def _tokens(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, str) and TOKEN.search(value):
        yield path
    elif isinstance(value, dict):
        for key, child in value.items():
            if TOKEN.search(key):
                yield path
            yield from _tokens(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _tokens(child, (*path, index))


# What pydantic finds, in plain words


def explain(error: ValidationError, data: dict[str, Any], root: type[BaseModel] = Recipe) -> list[Fault]:
    """Turn pydantic's findings into one fault a key.

    Args:
        data: the plain data that were checked.
        root: the model that checked them.
    """
    found: dict[Path, list[str]] = {}
    branches: set[Path] = set()
    for item in error.errors(include_url=False):
        path, is_branch = _path_in_data(item["loc"], data, missing=item["type"] == "missing")
        text = _message(item, path, data, root)
        if text not in found.setdefault(path, []):
            found[path].append(text)
        if is_branch:
            branches.add(path)
    # Of a union like `text or list of text`, a fault inside the list says more than "must be text".
    inner = {path for path in branches if any(other[: len(path)] == path for other in found if other != path)}
    return [(path, _joined(texts, _value_at(data, path))) for path, texts in found.items() if path not in inner]


def _path_in_data(loc: tuple[int | str, ...], data: Any, *, missing: bool) -> tuple[Path, bool]:
    """Drop the names of union branches that pydantic mixes into a path."""
    path: list[int | str] = []
    value, dropped = data, False
    for index, step in enumerate(loc):
        in_list = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if in_list or (isinstance(value, dict) and step in value):
            value = value[step]
        elif not (missing and index == len(loc) - 1):
            dropped = True
            continue
        path.append(step)
    return tuple(path), dropped


def _value_at(data: Any, path: Path) -> Any:
    for step in path:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return None
    return data


_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "null",
    "finite_number": "a finite number",
}
_LIMITS = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}
_MUST_BE = "must be "


def _message(item: Any, path: Path, data: dict[str, Any], root: type[BaseModel]) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, data, root)
    if kind == "missing":
        return _missing(path)
    if kind == "wrong":
        return context["text"]
    if kind in _TYPES:
        return _MUST_BE + _TYPES[kind]
    if kind in _LIMITS:
        limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
        return _MUST_BE + _LIMITS[kind].format(**limits)
    if kind == "literal_error":
        return _MUST_BE + _choices(context["expected"], item["input"])
    if kind == "string_pattern_mismatch":
        return f"{_MUST_BE}text of the form {context['pattern'].strip('^$')}"
    if kind in ("string_too_short", "too_short"):
        return "is empty"
    return str(item["msg"])


def _choices(expected: str, value: Any) -> str:
    names = re.findall(r"'([^']*)'", expected)
    if len(names) < 2:
        return expected.replace("'", "")
    if len(names) > 15:
        holding = [name for name in names if isinstance(value, str) and value and value.lower() in name]
        some = (holding or difflib.get_close_matches(str(value), names, n=5) or names)[:5]
        return f"one of {len(names)} names, such as {', '.join(some)}"
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _joined(texts: list[str], value: Any) -> str:
    """Say what the value must be, what it is, and the likely remedy."""
    must = [text.removeprefix(_MUST_BE) for text in texts if text.startswith(_MUST_BE)]
    if not must:
        return "; ".join(texts)
    near = _near_choice(value, must)
    text = f"{_MUST_BE}{', or '.join(must)}, found {show(value)}"
    return f"{text}; {near}" if near else text


def _near_choice(value: Any, must: list[str]) -> str:
    wanted = ", or ".join(must)
    if isinstance(value, bool):
        # YAML 1.2 reads a bare `true` as a truth value even where text is meant.
        return f'write "{str(value).lower()}" in quotes if text is meant' if "text" in must else ""
    if isinstance(value, float) and value.is_integer() and "whole number" in wanted:
        return f"write {int(value)}"
    if not isinstance(value, str):
        return (
            f'write "{value}" in quotes if text is meant' if "text" in must and isinstance(value, int | float) else ""
        )
    if "true or false" in wanted and value.lower() in ("yes", "on", "y", "no", "off", "n", "true", "false"):
        return f"write {'true' if value.lower() in ('yes', 'on', 'y', 'true') else 'false'}"
    if "number" in wanted and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.IGNORECASE):
        return f"write {value} without quotes"
    names = [] if "names, such as" in wanted else re.split(r", or |, | or ", wanted)
    near = difflib.get_close_matches(value.lower(), names, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def _missing(path: Path) -> str:
    hints: dict[Path, str] = {
        ("model",): "is missing: name a model, as model: {path: HuggingFaceTB/SmolLM2-135M-Instruct} does",
        ("data",): "is missing: name data, as data: {source: train.jsonl} does",
        ("data", "source"): "is missing: give stdlib-docstrings, a path, a glob or a list of paths",
        ("hub", "repo"): "is missing: give user/name, or leave the section out to push nothing",
    }
    return hints.get(path, "is missing")


def _unknown_key(path: Path, data: dict[str, Any], root: type[BaseModel]) -> str:
    *above, key = path
    key = str(key)
    if "token" in key and above == ["hub"]:
        return "unknown key; tokens belong into the environment (HF_TOKEN, or `hf auth login`)"
    known = known_keys(tuple(above), data, root)
    if key in _KNOWN_AS and _KNOWN_AS[key].split(" ")[0].rstrip(":") in known:
        return f"unknown key; did you mean {_KNOWN_AS[key]!r}?"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    # A key in the wrong section is more likely than a distant resemblance.
    homes = [f"{name}.{key}" for name in SECTIONS if root is Recipe and key in known_keys((name,), data, root)]
    if not above and key in _KNOWN_AS:
        homes += [f"{n}.{_KNOWN_AS[key]}" for n in SECTIONS if _KNOWN_AS[key] in known_keys((n,), data, root)]
    if homes:
        return f"unknown key; did you mean {' or '.join(map(repr, homes))}?"
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    if len(known) > 40:
        return f"unknown key; the {len(known)} known ones are the fields of {_owner(tuple(above), data, root)}"
    return f"unknown key; known: {', '.join(known)}" if known else "unknown key"


def _owner(path: Path, data: dict[str, Any], root: type[BaseModel]) -> str:
    if path == ("train",):
        return KINDS["objective"][schema.kind_in("objective", data.get("objective"))].config[1]  # type: ignore[index]
    if path == ("adapter",):
        return KINDS["adapter"][schema.kind_in("adapter", data.get("adapter"))].config[1]  # type: ignore[index]
    return "AnyformerConfig"


def known_keys(path: Path, data: dict[str, Any], root: type[BaseModel] = Recipe) -> list[str]:
    """The keys that a mapping in a recipe may hold, without those that are refused."""
    model: type[BaseModel] | None = root
    refused: set[str] = set(schema.ARCHITECTURE_REFUSED) if root is not Recipe else set()
    for depth, step in enumerate(path):
        if root is Recipe and depth == 0:
            model = schema.section_model(str(step), data)
            refused = schema.refused_keys(str(step), data)
        elif path[: depth + 1] == ("model", "config"):
            model, refused = schema.architecture_model(), set(schema.ARCHITECTURE_REFUSED)
        elif isinstance(step, str):  # a number stands in a list, whose items have the model of the key before
            model = _nested(model, step)
            refused = set()
        if model is None:
            return []
    return [name for name in (model.model_fields if model else ()) if name not in refused]


def _nested(model: type[BaseModel] | None, step: int | str) -> type[BaseModel] | None:
    info = model.model_fields.get(str(step)) if model else None
    queue = [info.annotation] if info else []
    while queue:
        kind = queue.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        queue.extend(get_args(kind))
    return None
