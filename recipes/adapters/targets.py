"""Which modules and parameters of a model a recipe's names and parts stand for."""

import difflib
import fnmatch
import re
from collections.abc import Iterable
from typing import Any

from ..errors import UserError


def linear_modules(model: Any) -> dict[str, str]:
    """The name of every linear module -> the part of the model that it belongs to."""
    from torch import nn

    from ...modeling.counting import part_of

    return {n: part_of(f"{n}.weight") for n, m in model.named_modules() if isinstance(m, nn.Linear)}


# New last layers, which PEFT trains whole for the tasks that have them.
_TRAINED_WHOLE = ("score", "qa_outputs")
# What it writes into `modules_to_save` for such a task, whatever the model calls its layer.
_ADDED = ("classifier", *_TRAINED_WHOLE)


def left_out(model: Any) -> list[str]:
    """Linear modules that `all-linear` does not mean: gates that route tokens, and last layers that are trained whole.

    The head over the vocabulary PEFT leaves out by itself; other parts of a head are adapted, for they may be new.
    """
    parts = linear_modules(model).items()
    return sorted(name for name, part in parts if part == "router" or name in _TRAINED_WHOLE)


def modules_of_parts(model: Any, parts: Iterable[str]) -> list[str]:
    """Names for `target_modules` that stand for the linear modules of these parts and for no others.

    Raises:
        UserError: a part that has none.
    """
    linear = linear_modules(model)
    for part in parts:
        if part not in linear.values():
            raise UserError(f"adapter.target_parts: the model has no linear modules in {part!r}: leave it out")
    wanted = [name for name, part in linear.items() if part in parts]
    others = {name.rpartition(".")[2] for name, part in linear.items() if part not in parts}
    last = {name: name.rpartition(".")[2] for name in wanted}
    return sorted({short if short not in others else name for name, short in last.items()})


def expert_parameters(model: Any) -> list[str]:
    """Names for `target_parameters` that stand for the stacked matrices of all experts.

    Raises:
        UserError: the model has no experts.
    """
    from ...modeling.counting import part_of

    stacked = [name for name, p in model.named_parameters() if part_of(name) == "experts" and p.dim() == 3]
    if not stacked:
        raise UserError("adapter.target_parts: the model has no experts: leave experts out")
    return sorted({".".join(name.split(".")[-3:]) for name in stacked})  # mlp.experts.down_proj


def ia3_targets(model: Any) -> dict[str, list[str]]:
    """What the paper scales (sec. 3.3): keys, values, and what enters the last projection of a feed-forward block.

    With latent attention keys and values leave one projection. Stacked experts are no modules, so they are left out.
    """
    names = {name.rpartition(".")[2]: part for name, part in linear_modules(model).items()}
    attention = [name for name in ("k_proj", "v_proj", "kv_b_proj") if names.get(name) == "attention"]
    forward = [name for name in ("down_proj",) if names.get(name) == "mlp"]
    return {"target_modules": attention + forward, "feedforward_modules": forward}


def trained_in_place(model: Any, wanted: Iterable[str]) -> list[str]:
    """Names of the parameters that `adapter.train` of kind freeze stands for.

    An entry is a part of the model, a pattern with `*` for the whole name, or a piece of the name between dots.

    Raises:
        UserError: an entry that stands for nothing.
    """
    from ...modeling.counting import part_of

    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    chosen: set[str] = set()
    for entry in wanted:
        found = [name for name in every if _stands_for(entry, name, part_of(name))]
        if not found:
            parts = sorted({part_of(name) for name in every})
            pieces = sorted({piece for name in every for piece in name.split(".") if not piece.isdigit()})
            near = difflib.get_close_matches(entry, [*parts, *pieces], n=1)
            raise UserError(
                f"adapter.train: no parameter is meant by {entry!r}"
                + (f", did you mean {near[0]!r}?" if near else "")
                + f"; the model's parts are {', '.join(parts)}, and its parameters are called like {every[-2]}"
            )
        chosen.update(found)
    return sorted(chosen)


def _stands_for(entry: str, name: str, part: str) -> bool:
    if entry == part:
        return True
    if any(mark in entry for mark in "*?["):
        return fnmatch.fnmatchcase(name, entry)
    return f".{entry.strip('.')}." in f".{name}."


# What other suites call `all-linear`.
_ALL = "all"


def check_targets(model: Any, config: Any) -> None:
    """PEFT takes what it finds of a list of names and says nothing of the rest.

    Raises:
        UserError: names that the model does not have, or modules that must not be adapted.
    """
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    wrong = []
    for field, names in (
        ("target_modules", modules),
        ("feedforward_modules", modules),
        ("modules_to_save", modules),
        ("target_parameters", parameters),
    ):
        given = getattr(config, field, None)
        if field == "target_modules" and given is not None and _ALL in ([given] if isinstance(given, str) else given):
            raise UserError(f"adapter.target_modules: {_ALL!r} is no module: write target_modules: all-linear")
        for target in sorted(given) if isinstance(given, list | set | tuple) else ():
            if target not in _ADDED and not any(name == target or name.endswith(f".{target}") for name in names):
                near = difflib.get_close_matches(target, {n.rsplit(".", 1)[-1] for n in names}, n=1)
                wrong.append(f"{field} names {target!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    if wrong:
        raise UserError(
            f"adapter: {'; '.join(wrong)} The model has no such part; its linear modules are: {linear_names(model)}"
        )
    targets = getattr(config, "target_modules", None)
    targets = targets if isinstance(targets, list | set) else ()
    if "lm_head" in targets or ("embed_tokens" in targets and model.config.tie_word_embeddings):
        raise UserError(
            "adapter: target_modules holds lm_head, or the embedding of a model whose head is tied to it: the "
            "trainer's loss reads the head's weight directly, and merging would change both. Use modules_to_save"
        )


def check_effect(adapted: Any, config: Any, excluded: Any = None) -> None:
    """Keys of a fresh adapter that PEFT takes and that reach nothing, or not all that they name.

    Args:
        adapted: the model under the adapter made from `config`.
        excluded: `exclude_modules` as the recipe gives it.

    Raises:
        UserError: names the keys, and near names.
    """
    base, tuner = adapted.get_base_model(), getattr(adapted, "base_model", None)
    reached = [*getattr(tuner, "targeted_module_names", ()), *getattr(tuner, "targeted_parameter_names", ())]
    wrong = []
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, field, None) or ():
            if not _any_matches(rf"(.*\.)?({pattern})", reached):
                wrong.append(f"{field} names {pattern!r}, which is no adapted module{_near(pattern, reached)}")
    wrong += _excludes_nothing(adapted, excluded)
    wrong += _layers_absent(reached, getattr(config, "layers_to_transform", None))
    bias = getattr(config, "bias", "none")
    if bias != "none":
        held = [n for n, p in base.named_parameters() if p.requires_grad and n.endswith("bias") and ".lora_" not in n]
        if not held:
            where = "the model has" if bias == "all" else "the adapted modules have"
            wrong.append(f"bias is {bias!r}, and {where} no biases: leave it out")
    if wrong:
        raise UserError(f"adapter: {'; '.join(wrong)}")


def _excludes_nothing(adapted: Any, excluded: Any) -> list[str]:
    names = [n.replace(".base_layer", "") for n, _ in adapted.get_base_model().named_modules()]
    if isinstance(excluded, str):
        return [] if _any_matches(excluded, names) else [f"exclude_modules {excluded!r} matches no module"]
    absent = (e for e in sorted(excluded or ()) if not any(n == e or n.endswith(f".{e}") for n in names))
    return [f"exclude_modules names {e!r}, which the model does not have{_near(e, names)}" for e in absent]


def _layers_absent(reached: list[str], wanted: Any) -> list[str]:
    wanted = [wanted] if isinstance(wanted, int) else wanted or []
    there = {int(piece) for name in reached for piece in name.split(".") if piece.isdigit()}
    if absent := sorted(set(wanted) - there):
        found = f"; adapted are {', '.join(map(str, sorted(there)))}"
        return [f"layers_to_transform names {', '.join(map(str, absent))}, where nothing is adapted{found}"]
    return []


def _any_matches(pattern: str, names: Iterable[str]) -> bool:
    try:
        return any(re.fullmatch(pattern, name) for name in names)
    except re.error:
        return False


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted({n.rpartition(".")[2] for n in names}), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def linear_names(model: Any) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in linear_modules(model)}))
