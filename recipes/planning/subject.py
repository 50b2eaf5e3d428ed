"""What is planned: a recipe, a preset, a run's folder, or a model that is here or on the Hub."""

import difflib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..inspection.show import recipe_of
from ..loading import find_pipeline, load_preset, recipe_of_text, shipped, shipped_pipelines
from ..model_paths import PACKAGE, resolve_path
from ..models import (
    check_shape,
    config_of_checkpoint,
    config_of_preset,
    first_line,
    load_tokenizer,
)
from ..run_folder import METRICS, RECIPE
from ..schema import OBJECTIVES, SECTIONS, Recipe
from ..tokens.learned_tokenizer import learned_size
from ..yaml_tree import read_yaml

# What is assumed of a model that no recipe trains.
OBJECTIVE_OF = {"decoder": "pretrain", "encoder": "mlm", "encoder-decoder": "seq2seq"}
LENGTH, ROWS = 4096, 1
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Subject:
    """What is planned.

    Attributes:
        recipe: that trains it; of a bare model one is assumed.
        config: of the model.
        bare: no recipe was named.
        metrics: of a run's folder, if any.
        remarks: what was assumed.
        read: reads the recipe anew, with more overrides.
    """

    name: str
    recipe: Recipe
    config: Any
    bare: bool = False
    metrics: dict[str, Any] | None = None
    remarks: tuple[str, ...] = ()
    read: Callable[[Sequence[str]], Recipe] | None = None

    def changed(self, overrides: Sequence[str]) -> "Subject":
        """The same under more overrides.

        Raises:
            UserError: the recipe cannot have them.
        """
        if not overrides or self.read is None:
            return self
        recipe = self.read(overrides)
        if any(one.startswith("model.config") for one in overrides):
            return replace(self, recipe=recipe, config=config_of(recipe, own_vocabulary=self.bare)[0])
        return replace(self, recipe=recipe)  # the config is the same, and slow to read from a file of weights


def read_subject(name: str, overrides: Sequence[str] = (), *, stage: str | None = None) -> Subject:
    """Find what a name means and read its config; no weight is read, and no data.

    Args:
        name: a recipe's file, a shipped recipe or preset, a folder of stages, a run's folder, a model's folder or file,
            a `package:` path, or a Hub id.
        overrides: changes to the recipe; of a bare model, to the one that is assumed.
        stage: of a folder of stages.

    Raises:
        UserError: there is no such thing, or it cannot be read.
    """
    if not name.strip():
        raise UserError("the name is empty: give a recipe, a preset, a run's or a model's folder, or a Hub id")
    path = Path(name).expanduser()
    preset = _preset_named(name, path)
    if preset is not None:
        config = load_preset(preset)
        return _bare(name, {"preset": str(preset)}, config.get("architecture", "decoder"), overrides)
    if (path / RECIPE).is_file() and (path / METRICS).is_file():
        metrics = json.loads((path / METRICS).read_text(encoding="utf-8"))
        return _of_recipe(name, lambda more: recipe_of(str(path / RECIPE), [*overrides, *more], None), metrics)
    if find_pipeline(name) or _is_recipe(name, path):
        return _of_recipe(name, lambda more: recipe_of(name, [*overrides, *more], stage))
    if (path / "config.json").is_file() or name.startswith(PACKAGE) or path.suffix == ".gguf" or _is_hub_id(name, path):
        return _bare(name, {"path": name}, None, overrides)
    raise UserError(_unknown(name, path))


def _preset_named(name: str, path: Path) -> str | Path | None:
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        root, _ = read_yaml(path.read_bytes(), name)
        keys = set(root.value) if root is not None and isinstance(root.value, dict) else set()
        return path if keys and not keys & {*SECTIONS, "extends"} else None
    short = _short(name)
    return short if short in shipped("models") and not path.exists() else None


def _short(name: str) -> str:
    short = Path(name).as_posix().removeprefix("configs/").removeprefix("models/").removeprefix("recipes/")
    return short.removesuffix(".yaml").removesuffix(".yml")


def _is_recipe(name: str, path: Path) -> bool:
    return (path.is_file() and path.suffix in (".yaml", ".yml")) or _short(name) in shipped("recipes") or "=" in name


def _is_hub_id(name: str, path: Path) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not path.exists() and path.suffix not in (".yaml", ".yml")


def _unknown(name: str, path: Path) -> str:
    if path.is_dir():
        return f"{name}: the folder holds neither a model (config.json) nor a run ({RECIPE} and {METRICS}) nor stages"
    known = [*shipped("recipes"), *shipped_pipelines(), *shipped("models")]
    near = difflib.get_close_matches(_short(name), known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`anyformer list` shows the shipped ones"
    return f"{name}: no recipe, preset, folder or Hub id (user/name) is called so; {hint}"


def _of_recipe(name: str, read: Callable[[Sequence[str]], Recipe], metrics: dict[str, Any] | None = None) -> Subject:
    recipe = read(())
    config, remarks = config_of(recipe)
    return Subject(name, recipe, config, metrics=metrics, remarks=remarks, read=read)


def _bare(name: str, model: dict[str, str], architecture: str | None, overrides: Sequence[str]) -> Subject:
    """A model under a recipe that is assumed."""
    if architecture is None:
        architecture = _shielded(_Section(model["path"])).architecture
    kind, section = OBJECTIVE_OF[architecture], dict(model)
    if "preset" in model:
        section["tokenizer"] = "builtin:bytes"  # which is not read: the vocabulary is the preset's
    text = json.dumps(
        {
            "model": section,
            "objective": {"kind": kind},
            "data": {"source": "text.txt"},
            "train": {"per_device_train_batch_size": ROWS},
        }
    )

    def read(more: Sequence[str]) -> Recipe:
        return recipe_of_text(text, f"a plan of {name}", [*overrides, *more])

    recipe = read(())
    config, remarks = config_of(recipe, own_vocabulary=True)
    return Subject(name, recipe, config, bare=True, remarks=remarks, read=read)


@dataclass(frozen=True)
class _Section:
    """As much of a recipe's `model` section as `config_of_checkpoint` reads."""

    path: str
    preset: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {}


def _shielded(section: Any) -> Any:
    """`config_of_checkpoint`, its errors as the user's.

    Raises:
        UserError: what cannot be read.
    """
    from huggingface_hub.errors import StrictDataclassError

    from ...modeling.interop import ConversionError

    try:
        return config_of_checkpoint(section, config_alone=True)
    except (ConversionError, StrictDataclassError, TypeError) as error:
        said = first_line(error).removeprefix(f"{section.path}: ")
        raise UserError(f"{section.path}: {said}") from error


def config_of(recipe: Recipe, *, own_vocabulary: bool = False) -> tuple[Any, tuple[str, ...]]:
    """The config of a recipe's model, and what had to be assumed of it.

    Args:
        own_vocabulary: of a preset, whatever the tokenizer.

    Raises:
        UserError: it cannot be read, or the objective does not train it.
    """
    from huggingface_hub.errors import StrictDataclassError

    section = recipe.model
    remarks: tuple[str, ...] = ()
    if section.path is not None:
        config = _shielded(section)
    else:
        tokenizer, size = None, learned_size(section.tokenizer)
        if not own_vocabulary and size is None:
            tokenizer, remarks = _tokenizer_of(section)
        try:
            config = config_of_preset(section, tokenizer)
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise UserError(f"model: {first_line(error)}") from error
        if size is not None:
            config.vocab_size = size
    folder = recipe.adapter.path
    if folder is not None:
        from ..adapters import BadAdapterError, rows_needed

        try:
            config.vocab_size = rows_needed(folder, config.vocab_size)
        except BadAdapterError as error:
            raise UserError(f"adapter.path: {error}") from error
    check_shape(config, section, OBJECTIVES[recipe.objective.kind].shapes)
    if config.architecture == "encoder-decoder":  # a trainer sets these by the tokenizer
        config.pad_token_id = config.pad_token_id or 0
        config.decoder_start_token_id = config.decoder_start_token_id or config.pad_token_id
    return config, remarks


def _tokenizer_of(section: Any) -> tuple[Any, tuple[str, ...]]:
    try:
        if section.tokenizer is not None:
            resolve_path(section.tokenizer)
        return load_tokenizer(section, ends=False), ()
    except UserError:
        where = section.tokenizer
        return None, (f"the tokenizer {where} cannot be read here: the vocabulary is that of {section.preset}",)
