"""Mistakes in a recipe that no single section can see."""

from collections.abc import Iterator
from typing import Any

from . import schema
from .adapters.checks import across_adapter, across_quantization
from .adapters.saved import SOFT_PROMPTS
from .checks_drafting import across_drafting
from .checks_preference import across_preference
from .checks_rewards import across_rewards
from .checks_training import across_training
from .data.builtin import BUILT_IN
from .data.formats import FORMATS
from .errors import UserError
from .introspection import UNKNOWN, class_fields
from .schema import KINDS, SECTIONS
from .tokens.learned_tokenizer import learned_size
from .yaml_tree import Path, show

Fault = tuple[Path, str]
# Objectives whose last layer is new: an adapter by itself opens on a base that lacks it.
ADD_A_LAYER = ("classify", "token-classify", "reward")


def across(data: dict[str, Any], reported: set[Path]) -> Iterator[Fault]:
    """The faults of combinations.

    Args:
        data: the recipe as it was read.
        reported: keys with faults of their own, whose values must not be reasoned about.
    """
    sections: dict[str, dict[str, Any]] = {name: _mapping(data.get(name)) for name in SECTIONS}
    yield from _across_model(sections["model"], "model" in data)
    yield from _across_objective(sections["model"], sections["objective"])
    yield from _across_train(sections, data)
    kind = schema.kind_in("objective", data.get("objective"))
    yield from _across_data(sections["data"], kind)
    if kind in KINDS["objective"]:
        yield from across_rewards(kind, sections)
    if kind in KINDS["objective"]:
        yield from _across_truncation(kind, sections)
    if kind == "sft" and "train" in data:
        yield from _across_smoothing(sections)
    if kind in KINDS["objective"] and not any(path[:1] in (("train",), ("adapter",)) for path in reported):
        yield from across_preference(kind, sections)
    if (
        (entry := KINDS["objective"].get(kind)) is not None
        and entry.config
        and not any(p[0] == "train" for p in reported)
    ):
        defaults = {name: item.default for name, item in class_fields(*entry.config).items()}
        known = {name: value for name, value in (defaults | entry.defaults).items() if value is not UNKNOWN}
        yield from across_training(kind, sections, known)
    steps = {("train", f"{name}_{what}") for name in ("eval", "save", "logging") for what in ("strategy", "steps")}
    if not steps & reported:
        yield from _across_evaluation(sections, data)
    if kind in schema.DRAFTS:
        yield from across_drafting(kind, sections)
    else:
        if not any(path[:2] == ("model", "quantization") for path in reported):
            yield from across_quantization(sections["model"])
        yield from _across_adapter(sections)
    if kind in ("classify", "token-classify"):
        yield from _across_classes(sections)
    if kind in ADD_A_LAYER and sections["adapter"].get("merge") is False:
        yield (
            ("adapter", "merge"),
            "the objective adds a layer that the base model does not have, and the adapter would open on a base "
            "without it: remove the key (the adapter alone is saved beside the merged model)",
        )
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
            "a preset has no tokenizer: set model.tokenizer to a Hub id, a folder, a package: file, builtin:bytes, or "
            "builtin:bpe:4096 to learn one from the training rows",
        )
    yield from _across_learned_tokenizer(model.get("tokenizer"), path)
    if model.get("context_extension") is not None:
        where = ("model", "context_extension")
        if preset is not None:
            yield (
                where,
                "extends what a checkpoint has learned (model.path); a new model is made for its length: remove it",
            )
        for name in {"rope_parameters", "max_position_embeddings"} & set(_mapping(model.get("config"))):
            yield ("model", "config", name), "is set by model.context_extension too: remove one of the two"


def _across_learned_tokenizer(name: Any, path: Any) -> Iterator[Fault]:
    where = ("model", "tokenizer")
    try:
        learned = learned_size(name if isinstance(name, str) else None)
    except UserError as error:
        yield where, str(error)
    else:
        if learned and path is not None:
            yield where, "is learned for a new model (model.preset); a checkpoint has a tokenizer: remove the key"


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


def _across_data(data: dict[str, Any], kind: str) -> Iterator[Fault]:
    if data.get("eval_source") is not None and data.get("eval_fraction"):
        yield ("data", "eval_fraction"), "eval_source names the held-out rows already: remove one of the two"
    items = list(_items(data.get("source"), ("data", "source")))
    for path, item in items:
        yield from _across_built_in(data, path, item, alone=len(items) == 1)
    weighted = [path for path, item in items if item.get("weight") is not None]
    for path, item in _items(data.get("eval_source"), ("data", "eval_source")):
        if item.get("weight") is not None:
            yield (*path, "weight"), "is for training; held-out rows are measured once each: remove it"
    if weighted and kind in KINDS["objective"] and kind not in _WEIGHTED:
        text = f"{kind} takes each row once an epoch; weights are for {', '.join(_WEIGHTED)}. Give max_rows instead"
        yield from (((*path, "weight"), text) for path in weighted)
    if data.get("epoch_rows") is not None and not weighted:
        yield ("data", "epoch_rows"), "is for sources with weights: without one every row comes once an epoch"
    if data.get("streaming") is True and kind in KINDS["objective"] and kind not in _STREAMED:
        text = f"{kind} needs all rows at once, as to count labels or make pairs; streaming is for"
        yield ("data", "streaming"), f"{text} {' and '.join(_STREAMED)}: remove it"


# Objectives that train on tokens alone, so that an epoch may hold a row twice or not at all.
_WEIGHTED = ("sft", "seq2seq", "pretrain", "classify", "token-classify")
# Objectives that go through the rows once and never by number.
_STREAMED = ("sft", "pretrain")


def _items(value: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The sources in a recipe's value, as mappings, with the path of each."""
    for number, item in enumerate(value) if isinstance(value, list) else ((None, value),):
        here = path if number is None else (*path, number)
        if isinstance(item, str | dict):
            yield here, {"path": item} if isinstance(item, str) else item


def _across_built_in(data: dict[str, Any], path: Path, item: dict[str, Any], *, alone: bool) -> Iterator[Fault]:
    name = item.get("path")
    built_in = BUILT_IN.get(name) if isinstance(name, str) else None
    if built_in is None:
        return
    for key in ("format", "columns"):
        value, where = item.get(key), (*path, key)
        if value is None and (alone or key == "format"):
            value, where = data.get(key), ("data", key)
        if key == "format" and value in FORMATS and value not in built_in.formats:
            yield where, f"{name} is {built_in.format}, not {value}: remove the key"
        if key == "columns" and value:
            yield where, f"{name} has no columns to rename: remove the key"


def _across_truncation(kind: str, sections: dict[str, dict[str, Any]]) -> Iterator[Fault]:
    here, policy = ("data", "truncation"), sections["data"].get("truncation")
    reason, preset = KINDS["objective"][kind].unsplit, _preset(sections["model"])
    if kind == "sft" and preset is not None and preset.get("architecture") == "encoder-decoder":
        reason = schema.WHOLE_SOURCE
    if policy == "split" and reason:
        yield here, f"split is not possible with objective {kind}: {reason}. Set drop, keep_start or keep_end"
    packing = sections["objective"].get("packing", "blocks")
    if kind == "pretrain" and packing != "none" and policy in ("keep_start", "keep_end", "split"):
        text = f"has no effect with objective.packing: {packing}, which keeps every token: remove it, or set "
        yield here, f"{text}objective.packing to none"


def _across_train(sections: dict[str, Any], data: dict[str, Any]) -> Iterator[Fault]:
    train = sections["train"]
    for one, other in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if train.get(one) is True and train.get(other) is True:
            yield ("train", other), f"{one} and {other} are both true: choose one"
    if train.get("global_batch_size") is not None and train.get("gradient_accumulation_steps") is not None:
        text = "follows from global_batch_size, the rows of a batch and the number of processes: remove one of the two"
        yield ("train", "gradient_accumulation_steps"), text
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


def _across_smoothing(sections: dict[str, dict[str, Any]]) -> Iterator[Fault]:
    here, train = ("train", "label_smoothing_factor"), sections["train"]
    if not train.get("label_smoothing_factor"):
        return
    if train.get("loss_type") == "dft":
        yield here, "has no effect on the loss dft: remove one of the two"
    kind = schema.kind_in("adapter", sections["adapter"])
    if kind in SOFT_PROMPTS:
        text = f"is computed on the logits of all places, and {kind} adds places that have no label: remove it"
        yield here, text


def _across_classes(sections: dict[str, dict[str, Any]]) -> Iterator[Fault]:
    problem = sections["objective"].get("problem", "single-label")
    if problem != "single-label" and sections["train"].get("label_smoothing_factor"):
        text = f"smooths one class among others, not {problem} targets: remove it"
        yield ("train", "label_smoothing_factor"), text
    if problem == "regression" and sections["objective"].get("labels") is not None:
        yield ("objective", "labels"), "a regression has values, no classes: remove it"


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
