"""The rungs of a ladder: stages of a pipeline, each of which changes the architecture of the one that it extends."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...modeling.configuration_anyformer import AnyformerConfig
from ..errors import UserError
from ..loading import STAGE_FILE, describe, load_preset
from ..stages import Pipeline, Stage
from ..yaml_tree import plain, read_yaml

# Tokens of the prompt, and of the text that is written to it, when speeds are measured.
PROMPT, WRITTEN = 64, 64
# What may differ between rungs: their places, and the parts of the architecture.
_OWN = {("train", "output_dir"), ("train", "run_name"), ("model", "config"), ("model", "preset")}


@dataclass(frozen=True)
class Rung:
    """One architecture of a ladder.

    Attributes:
        parent: the name of the rung that it extends; None of the first.
        changes: field of the config -> (of the parent, of this one); of the first nothing.
        about: the first comment of its file.
    """

    stage: Stage
    parent: str | None
    changes: dict[str, tuple[Any, Any]]
    about: str

    @property
    def name(self) -> str:
        return self.stage.name


def rungs_of(pipeline: Pipeline) -> list[Rung]:
    """All rungs in their order.

    Raises:
        UserError: a stage that is no rung: it trains something else than a language model from scratch, or differs from
            the first in more than its architecture.
    """
    first = pipeline.stages[0]
    for stage in pipeline.stages:
        recipe, where = stage.recipe, f"stage {stage.name} ({stage.file.name})"
        if recipe.objective.kind != "pretrain" or recipe.model.path:
            raise UserError(
                f"{where}: a rung of a ladder pretrains a new model: objective.kind pretrain, and no model.path"
            )
        if recipe.adapter.kind != "none":
            raise UserError(f"{where}: adapter.kind: a rung of a ladder trains all weights: write none")
        if not recipe.data.eval_fraction and not recipe.data.eval_source:
            raise UserError(f"{where}: no row is held out to compare by: set data.eval_fraction or data.eval_source")
        if (packing := getattr(recipe.objective, "packing", None)) != "blocks":
            raise UserError(
                f"{where}: objective.packing: {packing}: rows of all lengths make steps of unequal tokens; a ladder's "
                "budget needs blocks"
            )
        longest = AnyformerConfig(**_architecture(stage)).max_position_embeddings
        if longest < PROMPT + WRITTEN:
            raise UserError(
                f"{where}: max_position_embeddings is {longest}: speeds are measured on texts of {PROMPT + WRITTEN} "
                "tokens: set at least that"
            )
        if differ := list(_differing(first, stage)):
            raise UserError(
                f"{where}: {', '.join(differ)} differs from stage {first.name}: rungs share data and budget, so that "
                "what they differ in is the architecture"
            )
    return [_rung(pipeline, stage) for stage in pipeline.stages]


def _differing(first: Stage, stage: Stage) -> Iterator[str]:
    one, other = (_flat(each.recipe.model_dump()) for each in (first, stage))
    for key in sorted(one.keys() | other.keys()):
        if key[:2] not in _OWN and one.get(key) != other.get(key):
            yield ".".join(key)


def _flat(tree: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        here = (*path, str(key))
        found |= _flat(value, here) if isinstance(value, dict) else {here: value}
    return found


def _rung(pipeline: Pipeline, stage: Stage) -> Rung:
    parent = _parent(pipeline, stage)
    before = _architecture(pipeline[parent]) if parent else {}
    now = _architecture(stage)
    one, other = (AnyformerConfig(**fields) for fields in ((before or now), now))
    pairs = {key: (getattr(one, key), getattr(other, key)) for key in {**before, **now}}
    changes = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if parent and not changes:
        raise UserError(f"stage {stage.name} ({stage.file.name}): changes nothing of {parent}, which it extends")
    return Rung(stage, parent, changes, describe(stage.file))


def _architecture(stage: Stage) -> dict[str, Any]:
    model = stage.recipe.model
    assert model.preset is not None, "a rung has no path"
    return load_preset(model.preset) | dict(model.config)


def _parent(pipeline: Pipeline, stage: Stage) -> str | None:
    """The rung whose file this one extends, else the rung before it."""
    root, _ = read_yaml(stage.file.read_bytes(), str(stage.file))
    extends = plain(root).get("extends") if root is not None else None
    names = [extends] if isinstance(extends, str) else extends or []
    for name in reversed(names):
        if match := STAGE_FILE.fullmatch(name):
            return match[2]
    before = pipeline.stages.index(stage) - 1
    return pipeline.stages[before].name if before >= 0 else None
