"""An adapter on disk, read without importing PEFT: a recipe that goes on from one is checked like any other."""

import json
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Where a base is written that nobody could find otherwise, inside the adapter's folder.
BASE = "base"
# In the file of weights, before the names of the model.
PREFIX = "base_model.model."
# PEFT's name for a kind -> ours.
KINDS = {
    "LORA": "lora",
    "PROMPT_TUNING": "prompt-tuning",
    "P_TUNING": "p-tuning",
    "PREFIX_TUNING": "prefix-tuning",
    "IA3": "ia3",
}
SOFT_PROMPTS = ("prompt-tuning", "p-tuning", "prefix-tuning")


class BadAdapterError(ValueError):
    """A folder that holds no adapter that can be trained on; the message says what is wrong with it."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The fields of a saved adapter.

    Raises:
        BadAdapterError: no adapter is there, or it cannot be read.
    """
    path = Path(folder).expanduser() / CONFIG
    if not path.is_file():
        raise BadAdapterError(f"{folder} holds no {CONFIG}: give the folder of a saved adapter, such as runs/x/adapter")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadAdapterError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict) or "peft_type" not in fields:
        raise BadAdapterError(f"{path} is no adapter's: it has no peft_type")
    return fields


def kind_of_saved(folder: str | Path) -> str:
    """The kind of a saved adapter, in the recipe's words.

    Raises:
        BadAdapterError: there is none, or it is of a kind that no recipe trains.
    """
    peft_type = str(read_config(folder)["peft_type"])
    if peft_type not in KINDS:
        raise BadAdapterError(
            f"{folder} holds an adapter of type {peft_type}; recipes train {', '.join(KINDS.values())}"
        )
    return KINDS[peft_type]


def has_encoder(fields: dict[str, Any]) -> bool:
    """Whether a network computes the prompt, so that the prompt alone is not all that was trained.

    Args:
        fields: of a PEFT config, or of a recipe's section with `kind`.
    """
    kind = fields.get("kind") or KINDS.get(str(fields.get("peft_type")))
    return kind == "p-tuning" or (kind == "prefix-tuning" and fields.get("prefix_projection") is True)


def shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a saved adapter, read from the header of its file.

    Raises:
        BadAdapterError: there is no file that can be read.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(folder).expanduser() / WEIGHTS
    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BadAdapterError(f"{path} cannot be read: {error}") from error


def rows_needed(folder: str | Path, held: int) -> int:
    """Rows of the embedding that the base needs for a saved adapter; an adapter made after tokens were added holds the
    longer embedding or head, or trains single rows of it.

    Args:
        held: rows that the base has.

    Raises:
        BadAdapterError: the adapter was made for a shorter embedding.
    """
    rows = set()
    for name, shape in shapes(folder).items():
        table = name.removesuffix(".weight").removesuffix(".base_layer").rpartition(".")[2]
        if name.endswith(".weight") and table in ("embed_tokens", "lm_head"):
            rows.add(shape[0])
        elif name.endswith("embed_tokens.lora_embedding_A"):  # [r, rows]
            rows.add(shape[1])
        elif name.endswith("lm_head.lora_B.weight"):  # [rows, r]
            rows.add(shape[0])
    if len(rows) > 1 or (rows and max(rows) < held):
        found = " and ".join(map(str, sorted(rows)))
        raise BadAdapterError(f"{folder} was made for an embedding of {found} rows; the model has {held}")
    given = read_config(folder).get("trainable_token_indices") or []
    lists = given.values() if isinstance(given, dict) else [given]
    return max([held, *rows, *(index + 1 for indices in lists for index in indices)])
