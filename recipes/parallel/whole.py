"""A sharded model put together again, a few tensors at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .world import current, wait
from .zero import is_split, whole_parameter

# Bytes of a file of weights. The process that writes holds no more than one file and its own part of the model.
FILE_BYTES = 1_000_000_000


def save_whole(model: Any, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """Write a sharded model as a folder that `from_pretrained` opens; every process calls it.

    Peak memory: a process's part of the model, and in the first process one file; a tensor that is larger than
    `file_bytes` has a file of its own.
    """
    import torch
    from safetensors.torch import save_file

    model = getattr(model, "_orig_mod", model)
    files = _files(model, file_bytes)
    held = dict(_named(model))
    for file, names in files.items():
        tensors = {}
        for name in names:
            whole = whole_tensor(held[name])  # the processes gather it together
            if current().main:
                tensors[name] = whole.detach().to("cpu").contiguous()
            del whole
        if current().main:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors
    if current().main:
        if len(files) > 1:
            _write_index(files, {name: t.numel() * t.element_size() for name, t in held.items()}, folder)
        _save_beside(model, folder)
    if torch.distributed.is_initialized():
        wait()


def is_sharded(model: Any) -> bool:
    """Whether each process has a part of the weights."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_tensor(tensor: Any) -> Any:
    """A tensor of which each process has a part, put together in all of them; another one as it is."""
    from torch.distributed.tensor import DTensor

    if is_split(tensor):
        return whole_parameter(tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Any) -> Any:
    """What this process has of a tensor."""
    from torch.distributed.tensor import DTensor

    if is_split(tensor):
        return tensor.ds_tensor
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_class(model: Any) -> Any:
    """The class of a model as it was before FSDP2 put a class of its own on top."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def shards_wanted() -> dict[str, Any]:
    """Arguments of `from_pretrained` with which each process of the run reads its part of the weights."""
    from transformers.distributed.configuration_utils import DistributedConfig

    count = current().processes
    split = DistributedConfig(tp_size=count) if current().strategy == "tp" else DistributedConfig(fsdp_size=count)
    return {"distributed_config": split}


def trained_values(model: Any) -> dict[str, Any]:
    """What an adapter has learned on a sharded base, on the CPU of the first process; every process calls it."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: whole_tensor(p).detach().cpu() for name, p in trained.items()}


def put_values(model: Any, values: dict[str, Any]) -> Any:
    """A model with what another process group's model has learned, by name.

    Raises:
        KeyError: the model has no such parameter.
    """
    import torch

    held = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            held[name].copy_(value)  # in the dtype that the model has
    return model


def _named(model: Any) -> Iterator[tuple[str, Any]]:
    """What is saved: parameters and persistent buffers, those that are tied once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    yield from ((name, tensor) for name, tensor in model.state_dict().items() if name not in tied)


def _files(model: Any, file_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors in each file."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    # Only shapes and dtypes are asked for.
    shapes = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in _named(model)}
    plan = split_torch_state_dict_into_shards(shapes, max_shard_size=file_bytes)
    return plan.filename_to_tensors


def _write_index(files: dict[str, list[str]], sizes: dict[str, int], folder: Path) -> None:
    where = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save_beside(model: Any, folder: Path) -> None:
    """Config, generation config and modeling files, as `save_pretrained` writes them."""
    import torch
    from transformers.dynamic_module_utils import custom_object_save

    kind, config = plain_class(model), model.config
    config.architectures, config.dtype = [kind.__name__], str(model.dtype).removeprefix("torch.")
    if model._auto_class is not None:
        with torch.device("meta"):
            skeleton = kind(config)  # its class is the one that others import
        custom_object_save(skeleton, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
