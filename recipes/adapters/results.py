"""From a trained adapter to what is kept: merged weights, or the adapter beside its base; and back again."""

import copy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from . import saved
from .attach import fit_vocabulary
from .fit import check_fit, check_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def restore_forward(model: Any) -> None:
    """TRL puts its own forward over the class's; what is measured and saved after training is the class's."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.__dict__.pop("forward", None)


def merge(model: Any) -> "PreTrainedModel":
    """The plain model with the adapter's change added to its weights; a model without an adapter as it is."""
    restore_forward(model)
    if not hasattr(model, "merge_and_unload"):
        return model
    try:
        merged = model.merge_and_unload()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"adapter: it cannot be merged: {error}. Set adapter.merge: false") from error
    say_untied(merged)
    return merged


def say_untied(model: Any) -> None:
    """Where training gave the head or the embedding weights of its own, a load must not tie them again."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head is not None and head.weight is not table.weight:
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def save_adapter(
    model: Any, folder: Path, base: str | None, revision: str | None = None, *, embeddings: bool = False
) -> None:
    """Write the adapter alone.

    Args:
        base: Hub id or folder that it belongs to, where there is one.
        embeddings: the base was given more rows than it has at `base`, so they are written too.
    """
    config = model.peft_config["default"]
    # While saving, PEFT would read a named base's config with our class, which a foreign base does not fit.
    config.base_model_name_or_path = ""
    # A trainer may have added another adapter, as its reference.
    model.save_pretrained(folder, save_embedding_layers=embeddings, selected_adapters=["default"])
    config = copy.copy(config)
    config.base_model_name_or_path, config.revision, config.inference_mode = base, revision, True
    if getattr(config, "prompt_tuning_init", None) == "TEXT":  # done; the tokenizer need not be where it was
        config.prompt_tuning_init = "RANDOM"
        config.prompt_tuning_init_text = config.tokenizer_name_or_path = config.tokenizer_kwargs = None
    config.save_pretrained(folder)


def save_unmerged(model: Any, folder: Path, base: str | None, *, embeddings: bool = False) -> None:
    """Write the adapter to `folder` so that it opens again with its base.

    Args:
        base: Hub id or folder of the base model; None: it is at neither, so it is written to `folder / "base"`.
        embeddings: as in `save_adapter`.
    """
    save_adapter(model, folder, base or str((folder / saved.BASE).resolve()), embeddings=embeddings)
    if base is None:
        bare(model).save_pretrained(folder / saved.BASE)


def bare(model: Any) -> Any:
    """The model as it was before the adapter was attached; the adapter is gone."""
    if not hasattr(model, "peft_config"):
        return model
    restore_forward(model)
    return model.unload() if hasattr(model, "unload") else model.get_base_model()


def put_on(model: Any, folder: Path | str) -> Any:
    """The model with a saved adapter, for use.

    Args:
        model: one of our classes. It is given the rows that the adapter wants in the embedding.

    Raises:
        UserError: tensors that are missing, surplus, of another shape or not finite.
    """
    from peft import PeftModel

    rows = saved.rows_needed(folder, model.get_input_embeddings().weight.shape[0])
    fit_vocabulary(model, rows)
    check_values(folder)
    if saved.KINDS.get(str(saved.read_config(folder)["peft_type"])) in saved.SOFT_PROMPTS:
        return PeftModel.from_pretrained(model, str(folder)).eval()
    with warnings.catch_warnings():
        # Names and shapes are compared below, where all that is wrong is a line.
        warnings.filterwarnings("ignore", "Found missing adapter keys|Some weights of")
        adapted = PeftModel.from_pretrained(model, str(folder), ignore_mismatched_sizes=True).eval()
    check_fit(adapted, folder)
    return adapted


def base_of(folder: Path | str) -> str:
    """The base that an adapter's folder names, or the one in it, so that a folder that was moved still opens.

    Raises:
        BadAdapterError: it names none.
    """
    named = saved.read_config(folder).get("base_model_name_or_path")
    inside = Path(folder) / saved.BASE
    if inside.is_dir() and (not named or not Path(named).exists()):
        return str(inside)
    if not named:
        raise saved.BadAdapterError(f"{folder} holds an adapter that names no base model")
    return str(named)


def opens_by_itself(folder: Path | str) -> bool:
    """Whether transformers' `from_pretrained` opens base and adapter, exactly: it knows no soft prompts, gives no model
    more rows, and looks for the base only where it was."""
    from transformers import AutoConfig

    if saved.kind_of_saved(folder) in saved.SOFT_PROMPTS or saved.read_config(folder).get("use_dora"):
        return False
    base = base_of(folder)
    if base != saved.read_config(folder).get("base_model_name_or_path"):
        return False
    held = AutoConfig.from_pretrained(base).get_text_config().vocab_size
    return saved.rows_needed(folder, held) == held


def open_adapter(folder: Path | str, auto_class: str, *, trust_remote_code: bool = False) -> Any:
    """Base and adapter as one model of ours, whatever class the base has at its place.

    Generation behind a soft prompt is exact on our classes; on the stock ones PEFT 0.21 loses the prompt meanwhile.
    """
    import transformers

    from ...modeling import AUTO_MAP, HEADS, AnyformerConfig
    from ...modeling.interop import import_model
    from ..models import with_head

    base = base_of(folder)
    config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code or None)
    if config.model_type == AnyformerConfig.model_type:
        auto = getattr(transformers, auto_class)
        model = auto.from_pretrained(base, dtype="auto", trust_remote_code=trust_remote_code or None)
    else:
        model, _ = import_model(base, trust_remote_code=trust_remote_code)
        wanted = AUTO_MAP[auto_class].rpartition(".")[2]
        head = next(name for name, cls in HEADS.items() if cls.__name__ == wanted)
        model = with_head(model, model.config, head, seed=0)
    return put_on(model, folder)
