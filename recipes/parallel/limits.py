"""What cannot be spread over processes, refused before anything is loaded."""

from typing import Any

from ..adapters.saved import SOFT_PROMPTS
from ..errors import UserError
from .strategy import Parallel

# Position embeddings that add a bias to each head's scores.
PER_HEAD = ("alibi", "relative")
# Sizes that tensor parallelism divides among the processes.
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")


def check_spread(recipe: Any, config: Any, parallel: Parallel) -> None:
    """Raises:
    UserError: a recipe, or its model, cannot be trained with the strategy that is asked for.
    """
    strategy, kind = parallel.strategy, recipe.adapter.kind
    if parallel.sharded and kind in SOFT_PROMPTS:
        raise UserError(f"--launch {strategy} splits weights, and a soft prompt is read as a whole: use ddp")
    if strategy == "tp":
        if kind != "none" or recipe.model.quantization is not None:
            raise UserError(
                f"--launch tp trains whole weights, and the recipe has adapter.kind {kind}: use ddp or fsdp2"
            )
        check_splits(config, parallel.processes)
    if strategy == "fsdp2" and config.architecture == "encoder-decoder" and config.share_embeddings:
        raise UserError(
            "--launch fsdp2 cannot split an embedding that encoder and decoder share: use ddp, or set "
            "model.config.share_embeddings: false"
        )


def check_splits(config: Any, processes: int) -> None:
    """Raises:
    UserError: the model has parts that the plan does not split, or sizes that are no multiple of the processes.
    """
    if config.architecture == "encoder-decoder":
        raise UserError("--launch tp: there is no plan of how to split an encoder-decoder: use ddp or fsdp2")
    whole = {
        "position_embedding": config.position_embedding if config.position_embedding in PER_HEAD else None,
        "attention_sinks": config.attention_sinks or None,
        "qk_norm": config.qk_norm if config.qk_norm not in ("none", "head") else None,
    }
    for name, value in whole.items():
        if value is not None:
            raise UserError(
                f"--launch tp: {name}: {value} goes over all heads or has values for each, which are not split: use "
                "fsdp2"
            )
    for name in SPLIT:
        value = getattr(config, name, None)
        if isinstance(value, int) and value % processes:
            raise UserError(
                f"--launch tp: {name} is {value}, which {processes} processes cannot share evenly: use fsdp2, or "
                "another number of processes"
            )
