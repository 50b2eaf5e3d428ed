"""Every mistake in a recipe at once: the schema's findings in plain words, and what no single section can see."""

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from . import schema
from .adapters.checks import across_adapter, across_quantization
from .checks_preference import across_preference
from .introspection import class_fields
from .row_formats import FORMATS
from .schema import KINDS, SECTIONS, Recipe
from .sources import BUILT_IN
from .yaml_tree import TOKEN, Path, kind_of, redact

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
    faults += [(path, text) for path, text in _across(data, reported) if not any(path[: len(p)] == p for p in reported)]
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


def show(value: Any) -> str:
    """A value for a message: short, and never an access token."""
    if isinstance(value, dict | list):
        return kind_of(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = redact(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


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
        else:
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


# What no single section can see


def _across(data: dict[str, Any], reported: set[Path]) -> Iterator[Fault]:
    sections: dict[str, dict[str, Any]] = {name: _mapping(data.get(name)) for name in SECTIONS}
    yield from _across_model(sections["model"], "model" in data)
    yield from _across_data(sections["data"])
    yield from _across_objective(sections["model"], sections["objective"])
    yield from _across_train(sections, data)
    kind = schema.kind_in("objective", data.get("objective"))
    # A value of the wrong kind is reported already, and must not be reasoned about.
    if kind in KINDS["objective"] and not any(path[:1] in (("train",), ("adapter",)) for path in reported):
        yield from across_preference(kind, sections)
    steps = {("train", f"{name}_{what}") for name in ("eval", "save", "logging") for what in ("strategy", "steps")}
    if not steps & reported:
        yield from _across_evaluation(sections, data)
    if not any(path[:2] == ("model", "quantization") for path in reported):
        yield from across_quantization(sections["model"])
    yield from _across_adapter(sections)
    kind = schema.kind_in("objective", data.get("objective"))
    if kind in ("classify", "token-classify"):
        yield from _across_classes(sections)
    if kind == "seq2seq":
        yield from _across_generation(sections["train"])


def _across_adapter(sections: dict[str, dict[str, Any]]) -> Iterator[Fault]:
    kind = schema.kind_in("adapter", sections["adapter"])
    entry = KINDS["adapter"].get(kind)
    if entry is None:
        return
    yield from across_adapter(sections, kind, class_fields(*entry.config) if entry.config else {})


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _across_model(model: dict[str, Any], given: bool) -> Iterator[Fault]:
    path, preset = model.get("path"), model.get("preset")
    if path is not None and preset is not None:
        yield ("model", "preset"), "path and preset are both set: keep one and set the other to null"
    elif path is None and preset is None and given:
        yield ("model",), "needs path (a model to start from) or preset (an architecture to train from scratch)"
    elif preset is not None and model.get("tokenizer") is None:
        yield (
            ("model", "preset"),
            "a preset has no tokenizer: set model.tokenizer to a Hub id, a folder, a package: file or builtin:bytes",
        )


def _across_objective(model: dict[str, Any], objective: dict[str, Any]) -> Iterator[Fault]:
    kind = schema.kind_in("objective", objective)
    entry, preset = KINDS["objective"].get(kind), _preset(model)
    if entry is not None and preset is not None:
        here, name, shape = ("objective", "kind"), model["preset"], preset.get("architecture", "decoder")
        fitting = [other for other, its in KINDS["objective"].items() if shape in its.shapes] or ["no objective yet"]
        pairs = preset.get("pooler") is True and _number(preset.get("type_vocab_size"), 0) >= 2
        if shape in schema.SHAPES and shape not in entry.shapes:
            found = f"{kind} does not train the preset {name}: it has architecture {shape}"
            right = f"which goes with {', '.join(fitting)}. Choose another objective or {_either(entry.shapes)}"
            yield here, f"{found}, {right}"
        elif kind == "mlm-nsp" and not pairs:
            lacks = f"reads the pooler and tells two texts apart by their token types, which the preset {name} lacks"
            yield here, f"mlm-nsp {lacks}: set model.config: {{pooler: true, type_vocab_size: 2}}"
    if kind in ("mlm", "mlm-nsp"):
        yield from _across_masking(objective)


def _preset(model: dict[str, Any]) -> dict[str, Any] | None:
    """The config fields of a recipe's preset under its own `model.config`; None where the preset cannot be read."""
    from .loading import RecipeError, load_preset

    name = model.get("preset")
    if not isinstance(name, str) or model.get("path") is not None:
        return None
    try:
        return load_preset(name) | _mapping(model.get("config"))
    except RecipeError:  # reported where presets are checked
        return None


def _number(value: Any, otherwise: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in names)


def _across_masking(objective: dict[str, Any]) -> Iterator[Fault]:
    masked, replaced = objective.get("mask_replace_prob"), objective.get("random_replace_prob")
    if objective.get("whole_word") is True:
        for name, value, only in (("mask_replace_prob", masked, 1), ("random_replace_prob", replaced, 0)):
            if value is not None and value != only:
                text = f"must be {only} or left out, found {show(value)}: the mask token alone hides whole words"
                yield ("objective", name), text
        return
    total = _number(masked, 0.8) + _number(replaced, 0.1)
    if total > 1:
        text = f"and mask_replace_prob come to {total:g}; what is left of 1 stays as it is, so lower one of them"
        yield ("objective", "random_replace_prob"), text


def _across_data(data: dict[str, Any]) -> Iterator[Fault]:
    if data.get("eval_source") is not None and data.get("eval_fraction"):
        yield ("data", "eval_fraction"), "eval_source names the held-out rows already: remove one of the two"
    source = data.get("source")
    built_in = BUILT_IN.get(source) if isinstance(source, str) else None
    if built_in is not None:
        wanted = data.get("format")
        if wanted in FORMATS and wanted not in built_in.formats:
            yield ("data", "format"), f"{source} is {built_in.format}, not {wanted}: remove the key"
        if data.get("columns"):
            yield ("data", "columns"), f"{source} has no columns to rename: remove the key"


def _across_train(sections: dict[str, Any], data: dict[str, Any]) -> Iterator[Fault]:
    train = sections["train"]
    for one, other in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if train.get(one) is True and train.get(other) is True:
            yield ("train", other), f"{one} and {other} are both true: choose one"
    scratch_fp16 = sections["model"].get("dtype") == "float16" and train.get("fp16") is True
    if scratch_fp16 and schema.kind_in("adapter", sections["adapter"]) == "none":
        yield ("train", "fp16"), "cannot scale gradients of weights in float16: set model.dtype to float32"
    if train.get("packing") is True and "max_length" in train and train["max_length"] is None:
        yield ("train", "packing"), "packs rows into blocks of max_length tokens: set train.max_length"
    for name in ("logging_steps", "eval_steps", "save_steps"):
        value = train.get(name)
        if isinstance(value, float) and value > 1 and not value.is_integer():
            yield ("train", name), f"must be a whole number of steps, or below 1 for a share of all, found {value:g}"


def _across_evaluation(sections: dict[str, Any], data: dict[str, Any]) -> Iterator[Fault]:
    entry = KINDS["objective"].get(schema.kind_in("objective", data.get("objective")))
    if entry is None or entry.config is None:
        return
    train, defaults = sections["train"], class_fields(*entry.config)

    def setting(name: str) -> Any:
        return train.get(name, defaults[name].default)

    strategy = setting("eval_strategy")
    held_out = sections["data"].get("eval_source") is not None or sections["data"].get("eval_fraction") != 0
    if strategy != "no" and not held_out:
        text = "nothing is held out to evaluate on: set data.eval_fraction or data.eval_source"
        yield ("train", "eval_strategy"), text
    if strategy == "no":
        if setting("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy"):
            text = "follows the evaluation loss: set train.eval_strategy to steps or epoch"
            yield ("train", "lr_scheduler_type"), text
        if setting("load_best_model_at_end") is True:
            yield ("train", "load_best_model_at_end"), "needs evaluation: set train.eval_strategy to steps or epoch"
    elif setting("load_best_model_at_end") is True and setting("save_strategy") != "best":
        yield from _best_model(setting)


def _best_model(setting: Any) -> Iterator[Fault]:
    here: Path = ("train", "load_best_model_at_end")
    if setting("eval_strategy") != setting("save_strategy"):
        text = f"save_strategy is {setting('save_strategy')} but eval_strategy is {setting('eval_strategy')}"
        yield here, f"{text}: make them equal, or set save_strategy to best"
        return
    evaluate = setting("eval_steps") or setting("logging_steps")
    save = setting("save_steps")
    both = isinstance(evaluate, int | float) and isinstance(save, int | float) and evaluate > 0
    if setting("eval_strategy") == "steps" and both and round(save / evaluate, 6) % 1:
        yield here, f"save_steps ({save:g}) must be a multiple of eval_steps ({evaluate:g})"


def _across_classes(sections: dict[str, dict[str, Any]]) -> Iterator[Fault]:
    problem = sections["objective"].get("problem", "single-label")
    if problem != "single-label" and sections["train"].get("label_smoothing_factor"):
        text = f"smooths one class among others, not {problem} targets: remove it"
        yield ("train", "label_smoothing_factor"), text
    if problem == "regression" and sections["objective"].get("labels") is not None:
        yield ("objective", "labels"), "a regression has values, no classes: remove it"
    if sections["adapter"].get("merge") is False:
        yield (
            ("adapter", "merge"),
            "the objective adds a layer that the base model does not have, and the adapter would open on a base "
            "without it: remove the key (the adapter alone is saved beside the merged model)",
        )


def _across_generation(train: dict[str, Any]) -> Iterator[Fault]:
    if train.get("predict_with_generate") is True:
        if train.get("eval_strategy", "no") == "no":
            text = "is for the evaluation in training, and there is none: set train.eval_strategy to steps or epoch"
            yield ("train", "predict_with_generate"), text
        return
    for name in ("generation_max_length", "generation_num_beams"):
        if train.get(name) is not None:
            text = "is for the evaluation in training with answers: set train.predict_with_generate to true"
            yield ("train", name), text
