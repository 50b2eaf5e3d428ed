"""What cannot be spread over processes, refused before anything is loaded."""

from typing import Any

from ..adapters.saved import SOFT_PROMPTS
from ..errors import UserError
from .strategy import Parallel

# Keys of a LoRA that starts without a look at the weights it is put on.
LORA_WITHOUT_WEIGHTS = {"r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias", "exclude_modules"}
# Objectives that look at nothing but the model that is split: no reference, no answers of its own, no second model.
SHARDED = ("pretrain", "sft", "mlm", "mlm-nsp", "seq2seq", "classify", "token-classify", "reward")
# Optimisers that update weights which are split; others have kernels or statistics of whole ones.
OF_PARTS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "muon")
# Position embeddings that add a bias to each head's scores.
PER_HEAD = ("alibi", "relative")
# Sizes that tensor parallelism divides among the processes.
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")


def check_spread(recipe: Any, config: Any, parallel: Parallel) -> None:
    """Raises:
    UserError: a recipe, or its model, cannot be trained with the strategy that is asked for.
    """
    strategy, kind = parallel.strategy, recipe.adapter.kind
    if parallel.strategy != "one":
        _check_train(recipe.train, parallel)
    if parallel.sharded and kind in SOFT_PROMPTS:
        raise UserError(f"--launch {strategy} splits weights, and a soft prompt is read as a whole: use ddp")
    if parallel.sharded and recipe.objective.kind not in SHARDED:
        raise UserError(
            f"--launch {strategy} splits weights, and objective {recipe.objective.kind} compares or samples with whole "
            "ones: use ddp"
        )
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


def _check_train(train: dict[str, Any], parallel: Parallel) -> None:
    """Raises:
    UserError: settings of the trainer that give other results in several processes, or fail there.
    """
    if train.get("average_tokens_across_devices") is False:
        raise UserError(
            "train.average_tokens_across_devices: false weighs each process alike, however few tokens it has"
        )
    for name in ("split_batches", "dispatch_batches"):
        if (train.get("accelerator_config") or {}).get(name):
            raise UserError(f"train.accelerator_config.{name} deals out rows in another way than this suite: remove it")
    optimizer = train.get("optim")
    if parallel.sharded and optimizer is not None and optimizer not in OF_PARTS:
        raise UserError(
            f"train.optim: {optimizer} was not made for weights that are split; {', '.join(OF_PARTS)} were, or use "
            "--launch ddp"
        )


def gets_its_part_later(recipe: Any, parallel: Parallel, *, check: bool) -> bool:
    """Whether this process needs no weights of its own: the first one hands out parts of what it has read.

    Args:
        check: the model is looked at before it is split.
    """
    adapter, quantized = recipe.adapter, recipe.model.quantization is not None
    plain = adapter.in_place or (adapter.kind == "lora" and set(adapter.arguments()) <= LORA_WITHOUT_WEIGHTS)
    if check or quantized or recipe.model.dtype == "auto":
        return False
    return parallel.strategy == "fsdp2" and not parallel.main and plain


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
