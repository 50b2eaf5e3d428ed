"""Which modules and parameters of a model a recipe's names and parts stand for."""

import difflib
import fnmatch
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


def linear_names(model: Any) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in linear_modules(model)}))
