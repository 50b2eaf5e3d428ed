"""Import and export of whole folders: weights, tokenizer, and the check of logits, as lines to print."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .atomic import share
from .console import quiet_libraries
from .errors import UserError
from .model_paths import resolve_path
from .models import (
    adapter_folder,
    auto_class_of,
    compare_with_stock,
    holds_tokenizer,
    load_pretrained,
    read_tokenizer,
    require_equal,
)
from .run_folder import RECIPE


def import_checkpoint(
    source: str,
    target: Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    verify: bool = True,
) -> Iterator[str]:
    """Write `source` as an anyformer folder to `target`.

    Yields:
        What was used, what was left unread, and how far the logits are apart.

    Raises:
        UserError: a source that cannot be imported exactly, or a target that exists.
    """
    quiet_libraries()
    import torch

    from ..modeling.interop import ConversionError, import_model

    _require_free(target)
    path = resolve_path(source)
    try:
        wanted = None if dtype == "auto" else getattr(torch, dtype)
        model, report = import_model(path, dtype=wanted, revision=revision, trust_remote_code=trust_remote_code)
    except ConversionError as error:
        raise UserError(f"{source}: {error}") from error
    parameters = model.num_parameters()
    yield f"{source}: {report.family}, {parameters:,} parameters in {str(model.dtype).removeprefix('torch.')}"
    yield f"weights used: {report.used}; ignored: {', '.join(report.ignored) or 'none'}"
    if report.unused_config_fields:
        yield f"config fields that the stock class does not read either: {', '.join(report.unused_config_fields)}"
    tokenizer = _tokenizer_or_none(path, revision, trust_remote_code)
    if verify and report.family != model.config.model_type:
        yield require_equal(compare_with_stock(model, tokenizer), "the stock class")
    _write(model, tokenizer, target)
    if tokenizer is None:
        yield "no tokenizer was found beside the model, so none was written"
    opener = auto_class_of(type(model).__name__)
    yield f"written to {target}: {opener}.from_pretrained({str(target)!r}, trust_remote_code=True)"


def export_checkpoint(
    source: str, target: Path, *, model_type: str | None = None, verify: bool = True
) -> Iterator[str]:
    """Write the anyformer folder `source` as a checkpoint of a family's stock class to `target`.

    Yields:
        What was written, and how far the logits are apart.

    Raises:
        UserError: the family cannot express the model, or a target that exists.
    """
    quiet_libraries()
    from ..modeling.interop import ConversionError, to_hf

    _require_free(target)
    model = load_pretrained(source, auto_class=_auto_class_in(source))
    if model.config.model_type != "anyformer":
        raise UserError(f"{source}: is a {model.config.model_type}, not an anyformer; there is nothing to export")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(
            f"{source}: is an adapter on its base; the stock class has no place for it. Train with "
            "adapter.merge: true, which writes one merged model"
        )
    try:
        stock: Any = to_hf(model, model_type=model_type, copy=False)
    except ConversionError as error:
        raise UserError(f"{source}: {error}") from error
    tokenizer = _tokenizer_or_none(resolve_path(source), None, False)
    if verify:
        yield require_equal(compare_with_stock(model, tokenizer, stock), type(stock).__name__)
    _write(stock, tokenizer, target)
    yield f"written to {target}: {type(stock).__name__}.from_pretrained({str(target)!r})"


def merge_adapter(
    source: str, target: Path, *, base: str | None = None, trust_remote_code: bool = False
) -> Iterator[str]:
    """Add the adapter in `source` to its base's weights, and write the model, under the head of the run, to `target`.

    Yields:
        What was merged and written.

    Raises:
        UserError: no adapter there, an unknown or unfit base, an adapter that has no place in weights, or a target
            that exists.
    """
    quiet_libraries()
    from peft import PeftConfig

    from ..modeling.interop import ConversionError
    from .adapters import base_of, load_under_head, merge

    _require_free(target)
    try:
        config = PeftConfig.from_pretrained(source)
    except KeyError as error:
        raise UserError(f"{source}: adapter_config.json names peft_type {error}, which PEFT does not know") from error
    except (ValueError, OSError, TypeError) as error:
        raise UserError(f"{source}: no adapter can be read there (adapter_config.json): {error}") from error
    if config.is_prompt_learning:
        raise UserError(
            f"{source}: is {config.peft_type.value}, whose vectors stand beside the weights: nothing to merge"
        )
    if not base and not config.base_model_name_or_path and not (base := _base_of_run(Path(source))):
        raise UserError(f"{source}: the adapter does not name its base: give it with --base, a folder or a Hub id")
    try:
        folder = adapter_folder(source) or Path(source)
        where = base or base_of(folder)
        revision = None if base else config.revision
        adapted, family = load_under_head(
            folder, resolve_path(where), revision=revision, trust_remote_code=trust_remote_code
        )
    except (ConversionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{source}: does not open on {base or config.base_model_name_or_path}: {error}") from error
    yield f"{source}: {config.peft_type.value} adapter on {where} ({family})"
    merged = merge(adapted)
    beside = source if holds_tokenizer(source) else resolve_path(where)
    tokenizer = _tokenizer_or_none(beside, None, trust_remote_code)
    _write(merged, tokenizer, target)
    yield f"written to {target}: {auto_class_of(type(merged).__name__)}.from_pretrained({str(target)!r})"


def _base_of_run(folder: Path) -> str | None:
    """The base of an adapter that lies in the folder of its run: one out of a package has no name that others know."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        recipe = YAML(typ="safe").load((folder.resolve().parent / RECIPE).read_text(encoding="utf-8"))
        return recipe["model"].get("path")
    except (OSError, YAMLError, AttributeError, KeyError, TypeError):
        return None


def _auto_class_in(source: str) -> str | None:
    """The Auto class of the head that the folder's config names."""
    config = Path(resolve_path(source)) / "config.json"
    try:
        names = json.loads(config.read_text(encoding="utf-8")).get("architectures") or [""]
    except (OSError, ValueError, AttributeError):  # an adapter, a Hub id, or broken: the loader says which
        return None
    return auto_class_of(names[0])


def _require_free(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already: name a new folder, nothing is overwritten")


def _tokenizer_or_none(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer beside the model; None where a folder or repository has none. One that is broken is an error."""
    folder = Path(path)
    if folder.is_dir() and not holds_tokenizer(path):
        return None
    try:
        return read_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code)
    except UserError:
        if folder.exists():
            raise
        return None


def _write(model: Any, tokenizer: Any, target: Path) -> None:
    """The whole folder or none of it."""
    from safetensors import SafetensorError

    temporary = target.with_name(target.name + ".tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        share(temporary.glob("*"))
        if target.is_dir():
            target.rmdir()  # empty, or `_require_free` would have refused it
        temporary.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{target} cannot be written: {error}") from error
