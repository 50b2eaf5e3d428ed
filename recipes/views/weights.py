"""The weights and the tokenizer behind a name, for attention maps."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..generator import tokenizer_place
from ..model_paths import resolve_path
from ..models import (
    adapter_folder,
    auto_class_of,
    config_of_checkpoint,
    load_model,
    load_pretrained,
    load_tokenizer_from,
)
from ..planning.fake_model import plain
from ..planning.subject import Subject


def place_of_weights(subject: Subject) -> str:
    """Where the weights of a subject are: its folder, file or Hub id; of a recipe the folder of its run.

    Raises:
        UserError: a preset, or a recipe that nobody has trained.
    """
    recipe = subject.recipe
    if subject.metrics is not None:
        return subject.name
    if subject.bare and recipe.model.path is not None:
        return recipe.model.path
    if subject.bare:
        raise UserError(
            f"{subject.name}: is a preset, which has no weights, so there is no attention to show: name a model's "
            "folder, .gguf file or Hub id, or a recipe that was trained"
        )
    folder = Path(str(recipe.train["output_dir"]))
    if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise UserError(
            f"{subject.name}: the recipe has no trained model in {folder}: run `anyformer train {subject.name}` "
            "first, or name the folder of a run"
        )
    return str(folder)


def open_weights(subject: Subject) -> tuple[Any, Any]:
    """The model with eager attention, which alone gives its weights, and its tokenizer.

    Raises:
        UserError: there are no weights, or they cannot be read.
    """
    path = place_of_weights(subject)
    where = resolve_path(path)
    folder = None if where.endswith(".gguf") else adapter_folder(where)
    model: Any
    if folder is not None:
        from ...modeling import HEADS
        from ..adapters import head_of_saved

        head = head_of_saved(folder)
        model = load_pretrained(path, auto_class=auto_class_of(HEADS[head].__name__) if head else None)
    else:
        changes: dict[str, Any] = {
            "path": path,
            "preset": None,
            "attn_implementation": "eager",
            "dtype": "auto",
            "config": {},
        }
        section = subject.recipe.model.model_copy(update=changes)
        model = load_model(section, config_of_checkpoint(section, config_alone=True), seed=0)[0]
    plain(model).set_attn_implementation("eager")
    tokenizer = load_tokenizer_from(tokenizer_place(path), ends=False)
    return model.eval(), tokenizer
