"""The same rows in each step, in the same order, whatever the number of processes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, RandomSampler, Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..arguments import rows_a_step
from ..tokens.masking import Masking
from ..tokens.report import IGNORE
from .world import current

# What a row for `tokens.masking.Masking` keeps.
FOR_MASKED = ("input_ids", "token_type_ids", "next_sentence_label")
# Of a row that only fills a batch so many places are kept: one token, and one that would be predicted.
_KEPT = 2


class Filled(Dataset[dict[str, Any]]):
    """A data set and, behind its rows, short copies of its first ones of which nothing is learned.

    Processes make their batches together, so each needs one; where rows run out, Accelerate gives rows out twice, and
    they would count twice.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows[index] for index in range(len(self.rows)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self.rows):
            return self.rows[index]
        return unlearned(self.rows[(index - len(self.rows)) % len(self.rows)])


def can_fill(row: Any, masked_later: bool) -> bool:
    """Whether a copy of a row can be made that adds nothing to the loss: it has a label for each token, or gets them
    when it is masked."""
    names = ("input_ids",) if masked_later else ("input_ids", "labels")
    return isinstance(row, Mapping) and all(_is_list(row.get(name)) for name in names)


def unlearned(row: "Mapping[str, Any]") -> dict[str, Any]:
    """The beginning of a row, without anything to learn."""
    kept = {name: value for name, value in row.items() if "labels" in row or name in FOR_MASKED}
    short = {name: value[:_KEPT] if _is_list(value) else value for name, value in kept.items()}
    if "next_sentence_label" in short:
        short["next_sentence_label"] = IGNORE
    # A row with labels is masked no more.
    return short | {"labels": [IGNORE] * len(short.get("labels", short["input_ids"]))}


def _is_list(value: Any) -> bool:
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping)


class FilledSampler(Sampler[int]):
    """The order of another sampler, then the numbers of rows that fill the last step."""

    def __init__(self, order: "Sampler[int]", rows: int, fill: int) -> None:
        self.order, self.rows, self.fill = order, rows, fill

    def __len__(self) -> int:
        return self.rows + self.fill

    def __iter__(self) -> Iterator[int]:
        yield from self.order
        yield from range(self.rows, self.rows + self.fill)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)


class SeededOrder(Sampler[int]):
    """A sampler that draws anew in each epoch, from the seed and the epoch's number alone.

    Args:
        order: a sampler with a `generator`.
    """

    def __init__(self, order: Any, seed: int) -> None:
        self.order, self.seed, self.epoch = order, seed, 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        self.order.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from self.order
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class SameOrder:
    """A part of a trainer: an epoch's last batches hold no row twice.

    A step of several processes has the rows that a step of one has: Accelerate deals out batches in turn. Only where
    the rows of an epoch do not fill the last batch of each process would it begin again at the first row.
    """

    train_dataset: Any
    args: Any
    data_collator: Any
    _train_batch_size: int

    def get_train_dataloader(self) -> Any:
        rows = self.train_dataset
        if not self._rows_to_fill():
            return super().get_train_dataloader()  # type: ignore[misc]
        self.train_dataset = Filled(rows)
        try:
            return super().get_train_dataloader()  # type: ignore[misc]
        finally:
            self.train_dataset = rows

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        sampler = super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if isinstance(sampler, LengthGroupedSampler):
            # Groups of a step's rows over all processes, which the library makes of one process's.
            sampler.batch_size = rows_a_step(self.args)
            sampler = SeededOrder(sampler, seed)
        if not isinstance(dataset, Filled):
            return sampler
        order = _seedable(sampler, self.args.data_seed) if isinstance(sampler, RandomSampler) else sampler
        return FilledSampler(order, len(dataset), self._fill(len(dataset)))

    def _rows_to_fill(self) -> int:
        dataset, strategy = self.train_dataset, self.args.train_sampling_strategy
        if current().replicas == 1 or self.args.dataloader_drop_last or strategy == "batch_rebalance":
            return 0
        masked_later = isinstance(self.data_collator, Masking)
        if not hasattr(dataset, "__len__") or not len(dataset) or not can_fill(dataset[0], masked_later):
            return 0
        return self._fill(len(dataset))

    def _fill(self, rows: int) -> int:
        return -rows % (self._train_batch_size * current().replicas)


def _seedable(sampler: RandomSampler, data_seed: int | None) -> Any:
    """What Accelerate puts in the place of a random sampler, so that one process has the same order."""
    from accelerate.data_loader import SeedableRandomSampler

    return SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator or torch.Generator(),
        data_seed=data_seed,
    )
