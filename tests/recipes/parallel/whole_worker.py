"""In each of several processes: shard a model by FSDP2, put it together in a folder, and note the most that was held.

whole_worker.py FOLDER MODEL_FOLDER FILE_BYTES
"""

import json
import sys
from pathlib import Path

import safetensors.torch
import torch
from torch.distributed.fsdp import fully_shard

from anyformer import AnyformerForCausalLM
from anyformer.recipes.parallel import whole
from anyformer.recipes.parallel.strategy import asked_for
from anyformer.recipes.parallel.world import begun


def main() -> None:
    folder, source, file_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    with begun(asked_for("ddp", None)) as parallel:
        model = AnyformerForCausalLM.from_pretrained(source)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard([model.model.embed_tokens, model.model.norm, model.lm_head])
        fully_shard(model)
        held: list[int] = []
        save, gather, alive = safetensors.torch.save_file, whole.whole_tensor, []

        def noted(tensors, *arguments, **options):
            held.append(sum(t.numel() * t.element_size() for t in tensors.values()))
            return save(tensors, *arguments, **options)

        def gathered(tensor):
            alive.append(tensor.numel() * tensor.element_size())
            return gather(tensor)

        safetensors.torch.save_file, whole.whole_tensor = noted, gathered
        whole.save_whole(model, folder, file_bytes=file_bytes)
        if parallel.main:
            (folder / "held.json").write_text(json.dumps({"files": held, "largest": max(alive)}), encoding="utf-8")


if __name__ == "__main__":
    main()
