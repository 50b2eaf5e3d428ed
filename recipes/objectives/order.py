"""The order in which a trainer sees its rows."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

_CHUNK = 1 << 16


class Shuffled(torch.utils.data.Sampler[int]):
    """Every row once, in an order that follows from seed and epoch alone.

    It is the order of the library's own sampler, which keeps it as a list of Python numbers: 36 bytes a row, where
    this one takes 8.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed, self.epoch = rows, seed, 0

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for chunk in order.split(_CHUNK):
            yield from chunk.tolist()


class OrderedTrainer(Trainer):
    """A trainer whose order of rows is the same for any number of processes, also when a run goes on in a later epoch.

    The library tells its sampler the epoch through the layers around it. In a run of several processes that goes on
    within an epoch there is one layer more than it looks through, and the order is that of the first epoch.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        if rows is None or self.args.train_sampling_strategy != "random":
            return super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler = Shuffled(len(rows), seed)
        self.add_callback(_Epochs(sampler))
        return sampler


class _Epochs(TrainerCallback):
    def __init__(self, sampler: Shuffled) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.sampler.epoch = int(state.epoch or 0)
