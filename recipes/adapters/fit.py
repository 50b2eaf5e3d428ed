"""Whether a saved adapter is whole and belongs to its base: PEFT leaves out, or starts anew, what does not fit."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import saved


def check_values(folder: Path | str) -> None:
    """Raises:
    UserError: a saved value is not finite; names its tensor.
    """
    from safetensors import safe_open

    path = Path(folder).expanduser() / saved.WEIGHTS
    if not path.is_file():  # an old format, which only PEFT reads
        return
    saved.shapes(folder)  # a file that cannot be read is told there
    with safe_open(path, framework="pt") as file:
        broken = [name for name in sorted(file.keys()) if not file.get_tensor(name).isfinite().all()]
    if broken:
        raise UserError(
            f"{folder}: the adapter holds values that are not finite (nan or inf) in {_some(broken)}: it comes of a "
            "training that diverged, or is damaged. Take an earlier checkpoint"
        )


def check_fit(adapted: Any, folder: Path | str) -> None:
    """Compare the tensors of a saved adapter with those of the model that it was put on.

    Args:
        adapted: the model under an adapter made from the folder's config, with or without storage.

    Raises:
        UserError: tensors that are missing, that have no place, or that have another shape.
    """
    from peft import get_peft_model_state_dict

    if not (Path(folder).expanduser() / saved.WEIGHTS).is_file():
        return
    held = saved.shapes(folder)
    base = adapted.get_base_model()
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    # Where rows were added, the file holds the whole embedding and head beside the adapter.
    around = {
        f"{saved.PREFIX}{name.replace('.default', '')}": tuple(tensor.shape)
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name
    }
    kind = type(base).__name__
    if lost := sorted(held.keys() - wanted.keys() - around.keys()):
        raise UserError(
            f"{folder}: the adapter holds {_some(lost)}, for which the {kind} of its base has no place: give the model "
            "that it was trained on. Where it was merged, the run's own folder holds the result"
        )
    if absent := sorted(wanted.keys() - held.keys()):
        raise UserError(
            f"{folder}: the adapter lacks {_some(absent)}, which its {saved.CONFIG} asks for on this {kind}: the file "
            "is incomplete, or the base has more layers than that which it was trained on"
        )
    places = around | wanted
    other = [
        f"{_short(name)} is {held[name]} and not {places[name]}" for name in sorted(held) if held[name] != places[name]
    ]
    if other:
        raise UserError(
            f"{folder}: the adapter does not fit the model or its own {saved.CONFIG}: {'; '.join(other[:2])}"
            + (f"; and {len(other) - 2} more" if len(other) > 2 else "")
        )


def _some(names: Iterable[str]) -> str:
    ordered = [_short(name) for name in names]
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _short(name: str) -> str:
    return name.removeprefix(saved.PREFIX)
