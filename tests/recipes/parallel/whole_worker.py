"""In each of several processes: shard a model by FSDP2 and put it together in a folder.

whole_worker.py FOLDER MODEL_FOLDER FILE_BYTES
"""

import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

from anyformer import AnyformerForCausalLM
from anyformer.recipes.parallel.strategy import asked_for
from anyformer.recipes.parallel.whole import save_whole
from anyformer.recipes.parallel.world import begun, leave


def main() -> None:
    folder, source, file_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    with begun(asked_for("ddp", None)):
        model = AnyformerForCausalLM.from_pretrained(source)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard([model.model.embed_tokens, model.model.norm, model.lm_head])
        fully_shard(model)
        save_whole(model, folder, file_bytes=file_bytes)
    leave()


if __name__ == "__main__":
    main()
