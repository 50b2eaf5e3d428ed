"""In each of several processes: put a model together of which each has a part, and note how the memory grew.

memory_worker.py FOLDER LAYERS WIDTH FILE_BYTES

FOLDER/RANK.json gets, in bytes, the process's `part` of the model, what is resident `before` and at `peak`, and the
size of the largest `tensor`. Every value of the parameter of number n is n.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

from anyformer import AnyformerConfig, AnyformerForCausalLM
from anyformer.recipes.parallel.strategy import asked_for
from anyformer.recipes.parallel.whole import own_part, save_whole
from anyformer.recipes.parallel.world import begun, gathered, leave

# glibc's number of the option, and from where on memory that is freed goes back to the system at once.
_MMAP_THRESHOLD, _BYTES = -3, 64 * 1024


def resident(name: str) -> int:
    """A figure of the kernel's, in bytes: VmRSS is what is resident, VmHWM the most there was."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def sharded(layers: int, width: int) -> AnyformerForCausalLM:
    """A model that never was whole: made without storage, and filled part by part."""
    with torch.device("meta"):
        model = AnyformerForCausalLM(
            AnyformerConfig(
                vocab_size=1024,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=layers,
                num_attention_heads=8,
                num_key_value_heads=8,
            )
        )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            own_part(parameter).fill_(number)
    return model


def main() -> None:
    folder, layers, width, file_bytes = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BYTES)
    with begun(asked_for("ddp", None)):
        model = sharded(layers, width)
        # What the first gathering and the first save need once: buffers of gloo, modules that are imported.
        small = folder / "small"
        small.mkdir(exist_ok=True)
        gathered(None)
        save_whole(sharded(1, 64), small, file_bytes=10**6)
        part = sum(own_part(p).nbytes for p in model.parameters())
        largest = max(p.numel() * p.element_size() for p in model.parameters())
        gathered(None)
        before = resident("VmRSS")
        forget_peak()
        save_whole(model, folder, file_bytes=file_bytes)
        found = {"part": part, "before": before, "peak": resident("VmHWM"), "tensor": largest}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    leave()


if __name__ == "__main__":
    main()
