"""The base of an adapter that is kept apart: who else finds it, and under which names of modules."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from .saved import BASE, SOFT_PROMPTS, BadAdapterError, read_config, rows_needed

if TYPE_CHECKING:
    from ..schema import Recipe


def keeps_adapter(recipe: "Recipe") -> bool:
    """Whether the result is an adapter beside its base rather than one merged model."""
    return not recipe.adapter.in_place and not recipe.adapter.merge


def published_base(recipe: "Recipe", family: str) -> str | None:
    """Where others, or this machine, find the base as it was before training; None where nobody does.

    Args:
        family: that the weights were imported from, or our own model type.
    """
    from ..models import hub_id

    section = recipe.model
    path = section.path
    if section.config or not opens_on_stock(recipe, family):  # the base as it was trained is nowhere else
        return None
    return hub_id(section) or (str(Path(path).resolve()) if path and Path(path).is_dir() else None)


def opens_on_stock(recipe: "Recipe", family: str) -> bool:
    """Whether an adapter of our model fits the stock class, which is what others open at the base's place.

    A soft prompt names no module; anything else fits where the modules have the same names and layout.
    """
    from ...modeling.interop import FAMILIES

    if family not in FAMILIES or recipe.adapter.kind in SOFT_PROMPTS:
        return True
    return all(ours == theirs for ours, theirs in FAMILIES[family].weights.items())


def other_base(recipe: "Recipe") -> str | None:
    """A sentence where the adapter that training goes on from was trained on another base than the recipe's.

    Only two folders that are there, or two Hub ids, can be told apart; a base that was moved is nobody's mistake.
    """
    from ..model_paths import resolve_path
    from ..models import hub_id

    folder, path = recipe.adapter.path, recipe.model.path
    if not folder or not path:
        return None
    named = read_config(folder).get("base_model_name_or_path")
    if not named or Path(named).resolve() == (Path(folder).expanduser() / BASE).resolve():  # kept inside for this run
        return None
    ours, theirs = Path(resolve_path(path)).expanduser(), Path(str(named)).expanduser()
    if ours.exists() and theirs.exists():
        same = ours.resolve() == theirs.resolve()
    else:
        id_of_base = re.fullmatch(r"[\w.-]+/[\w.-]+", str(named)) and not theirs.exists()
        same = not id_of_base or hub_id(recipe.model) in (None, str(named))
    if same:
        return None
    return (
        f"the adapter in {folder} was trained on {named}, and model.path is {path}: on other weights it is another "
        "change, and on a model that it was merged into it is added twice"
    )


def check_vocabulary(folder: str | Path, rows: int) -> None:
    """Compare the embedding of the base that a saved adapter names, where it is a folder here, with the model's.

    Args:
        rows: of the model's embedding.

    Raises:
        BadAdapterError: the adapter means tokens of another vocabulary.
    """
    named = read_config(folder).get("base_model_name_or_path")
    if not named:
        return
    try:
        fields = json.loads((Path(str(named)) / "config.json").read_text(encoding="utf-8"))
        held = fields.get("vocab_size") or fields["text_config"]["vocab_size"]
        same = rows_needed(folder, int(held)) == rows_needed(folder, rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or told elsewhere
        return
    if not same:
        raise BadAdapterError(
            f"{folder} was trained on {named}, whose embedding has {held} rows, and the model's has {rows}: its tokens "
            f"are others. Set model.path to {named}"
        )


def check_base_can_be_named(recipe: "Recipe") -> None:
    """An adapter by itself opens only where its base does.

    Raises:
        UserError: the recipe keeps the adapter apart from a base that it cannot name for those who open it.
    """
    from ..models import hub_id

    if not keeps_adapter(recipe):
        return
    soft = recipe.adapter.kind in SOFT_PROMPTS
    merge = "choose an adapter that merges, such as lora" if soft else "set adapter.merge: true"
    if recipe.hub is not None and hub_id(recipe.model) is None:
        raise UserError(
            f"hub.repo: {'a soft prompt' if soft else 'with adapter.merge: false only the adapter'} is pushed without "
            f"its base, and nobody else has {recipe.model.path or recipe.model.preset}. Set model.path to a Hub id, or "
            f"{merge}"
        )
    if recipe.adapter.arguments().get("use_dora"):
        raise UserError(
            "adapter.use_dora: transformers does not open a DoRA adapter by itself. Set adapter.merge: true, which "
            "writes one merged model and the adapter beside it"
        )
    if recipe.model.revision is not None:
        raise UserError(
            "model.revision: the saved adapter names its base, but not the revision, so it would open on another "
            f"model. Leave model.revision out, or {merge}"
        )


def check_published_base(recipe: "Recipe", family: str) -> None:
    """Raises:
    UserError: an adapter is to be pushed whose modules the stock class of its base calls otherwise.
    """
    if recipe.hub is not None and keeps_adapter(recipe) and not opens_on_stock(recipe, family):
        raise UserError(
            f"hub.repo: the stock class of {family} calls its modules otherwise, so the adapter alone would not open "
            f"on {recipe.model.path} for others. Set adapter.merge: true"
        )
