"""A sharded model put together again, a tensor at a time."""

import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .world import current, wait
from .zero import is_split, whole_parameter

# Bytes of a file of weights.
FILE_BYTES = 1_000_000_000


def save_whole(model: Any, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """Write a sharded model as a folder that `from_pretrained` opens; every process calls it.

    Peak memory: a process's part of the model and one whole tensor, whatever the size of a file.
    """
    import torch

    model = getattr(model, "_orig_mod", model)
    files = _files(model, file_bytes)
    held = dict(_named(model))
    for file, names in files.items():
        _write_tensors(folder / file, names, held)
    if current().main:
        if len(files) > 1:
            _write_index(files, {name: t.numel() * t.element_size() for name, t in held.items()}, folder)
        _save_beside(model, folder)
    if torch.distributed.is_initialized():
        wait()


def _write_tensors(path: Path, names: Sequence[str], held: dict[str, Any]) -> None:
    """A file of safetensors, as `safetensors.torch.save_file` would write it if it had all tensors at once.

    The format (https://github.com/huggingface/safetensors#format): the length of the header, the header in JSON with
    dtype, shape and place of each tensor, then their bytes, on machines that have the lowest first. Larger dtypes come
    first, so that all lie aligned.
    """
    order = sorted(names, key=lambda name: (-held[name].element_size(), name))
    main = current().main
    with (path if main else Path(os.devnull)).open("wb") as file:
        if main:
            file.write(_header({name: held[name] for name in order}))
        for name in order:
            whole = whole_tensor(held[name])  # the processes gather it together
            if main:
                file.write(_bytes_of(whole))
            del whole


def _header(tensors: dict[str, Any]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _name_of(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@functools.cache
def _name_of(dtype: Any) -> str:
    """What safetensors calls a dtype, read from a file of no values."""
    import torch
    from safetensors.torch import save

    written = save({"x": torch.empty(0, dtype=dtype)})
    return json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])["x"]["dtype"]


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


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
