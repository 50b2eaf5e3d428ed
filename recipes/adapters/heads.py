"""The head that an adapter was trained under, which its base need not have."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from . import saved

if TYPE_CHECKING:
    from ...modeling import AnyformerConfig

# PEFT's task -> key of `modeling.HEADS`. It has no name for masked language models: those keep the head of their base.
HEAD_OF_TASK = {
    "CAUSAL_LM": "causal_lm",
    "SEQ_2_SEQ_LM": "seq2seq_lm",
    "SEQ_CLS": "sequence_classification",
    "TOKEN_CLS": "token_classification",
    "QUESTION_ANS": "question_answering",
}
# What a run writes into the config beside the fields that its recipe sets.
_SET_BY_THE_RUN = ("id2label", "label2id", "problem_type", "pad_token_id", "decoder_start_token_id")


def head_of_saved(folder: Path | str) -> str | None:
    """The key of `modeling.HEADS` that a saved adapter was trained under; None: that of its base.

    Raises:
        BadAdapterError: there is no adapter.
    """
    return HEAD_OF_TASK.get(str(saved.read_config(folder).get("task_type")))


def load_under_head(
    folder: Path, base: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, str]:
    """Base and adapter under the head of the run, with the labels and settings that the run's folder tells.

    Args:
        folder: of the adapter.
        base: folder, Hub id or file of the base; revision: of its repository.

    Returns:
        The model under its adapter, and the family of the base.

    Raises:
        UserError: the adapter has weights that the model has no place for, or lacks some of the head's.
    """
    from ...modeling import HEADS
    from ..models import config_of_checkpoint, load_model, with_head
    from .results import put_on

    head = head_of_saved(folder)
    run = _config_of_run(folder, HEADS[head].__name__) if head else {}
    section = SimpleNamespace(path=base, preset=None, revision=revision, trust_remote_code=trust_remote_code)
    section.dtype, section.attn_implementation, section.config = "auto", "sdpa", _settings_of(run)
    config = config_of_checkpoint(section)
    _set_labels(config, run, folder)
    model, family = load_model(section, config, seed=0)
    held = {name.removeprefix("model.") for name in model.state_dict()}
    if head is not None:
        model = with_head(model, config, head, seed=0)
    _check_head(folder, [name for name in model.state_dict() if name.removeprefix("model.") not in held])
    return put_on(model, folder), family


def _config_of_run(folder: Path, architecture: str) -> dict[str, Any]:
    """The config of the merged model that a run wrote beside its `adapter/`; nothing where there is none."""
    from ...modeling import AnyformerConfig

    try:
        fields = json.loads((folder.resolve().parent / "config.json").read_text(encoding="utf-8"))
        same = fields["model_type"] == AnyformerConfig.model_type and fields["architectures"] == [architecture]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return fields if same and folder.resolve().name == "adapter" else {}


def _settings_of(run: dict[str, Any]) -> dict[str, Any]:
    from ..models import FREE_FIELDS

    return {name: run[name] for name in sorted(FREE_FIELDS) if name in run}


def _set_labels(config: "AnyformerConfig", run: dict[str, Any], folder: Path) -> None:
    for name in _SET_BY_THE_RUN:
        if name in run:
            value = run[name]
            setattr(config, name, {int(k): v for k, v in value.items()} if name == "id2label" else value)
    rows = [shape[0] for name, shape in _held_by(folder).items() if name == "score.weight"]
    if rows and config.num_labels != rows[0]:  # nobody tells their names
        config.num_labels = rows[0]


def _held_by(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of an adapter's tensors by name, without PEFT's prefix; none of a file in an old format."""
    if not (folder / saved.WEIGHTS).is_file():
        return {}
    return {name.removeprefix(saved.PREFIX): shape for name, shape in saved.shapes(folder).items()}


def _check_head(folder: Path, made_up: list[str]) -> None:
    """What nobody gives a new head stays random.

    Args:
        made_up: names of the model that its base does not hold.
    """
    absent = sorted(set(made_up) - set(_held_by(folder)))
    if absent:
        raise UserError(
            f"{folder}: the adapter was trained under a new head, and it does not hold {', '.join(absent[:3])} of it. "
            "The run's own folder is the merged model; an adapter by itself is complete with modules_to_save"
        )
