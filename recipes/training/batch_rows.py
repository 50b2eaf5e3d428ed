"""Which rows a batch was made of, found again when somebody must be told."""

import math
from itertools import islice
from typing import Any


def rows_of_batch(trainer: Any, micro_batch: int) -> list[int] | None:
    """Numbers of the training rows, from 0, that this process's batch of the step in progress holds.

    Nothing is recorded while all is well: the sampler of the epoch is asked for its order once more.

    Args:
        micro_batch: of the step, from 0.

    Returns:
        None where the order cannot be had again: streamed rows, and samplers without an order of their own.
    """
    loader: Any = getattr(trainer.callback_handler, "train_dataloader", None)
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or not _is_repeatable(batches):
        return None
    accumulated = trainer.args.gradient_accumulation_steps
    updates = max(math.ceil(len(loader) / accumulated), 1)
    epoch, update = divmod(trainer.state.global_step, updates)
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    found = next(islice(iter(batches), update * accumulated + micro_batch, None), None)
    if found is None:
        return None
    rows = len(trainer.train_dataset)  # beyond them an epoch is filled up with its first ones
    return _documents(trainer.train_dataset, [int(index) % rows for index in found])


def _documents(dataset: Any, rows: list[int]) -> list[int]:
    """The rows that packed rows join."""
    packs = getattr(dataset, "packs", None)
    return rows if packs is None else [document for row in rows for document in packs[row]]


def _is_repeatable(batches: Any) -> bool:
    from accelerate.data_loader import SeedableRandomSampler
    from torch.utils.data import SequentialSampler

    sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
    sampler = getattr(sampler, "order", sampler)  # of one that adds rows to it
    return isinstance(sampler, SeedableRandomSampler | SequentialSampler)
