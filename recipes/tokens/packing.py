"""Rows that hold several documents each, so that little of a batch is padding.

Documents stay whole and do not see each other: positions start again with each, and models keep apart what such
positions mark. The first token of a document is predicted by nothing, so loss and gradients are those of the same
documents in rows of their own.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .best_fit import best_fit
from .report import IGNORE

Packs = list[list[int]]


def spread_over(packs: Packs, count: int) -> Packs:
    """The same items in `count` bins: items of the fullest ones (by number of items) move into bins of their own.

    Raises:
        ValueError: there are fewer items than bins, or more bins than `count`.
    """
    packs = [list(pack) for pack in packs]
    while len(packs) < count:
        fullest = max(packs, key=len, default=[])
        if len(fullest) < 2:
            raise ValueError(f"{sum(map(len, packs))} items cannot fill {count} bins")
        half = len(fullest) // 2
        packs.append(fullest[half:])
        del fullest[half:]
    if len(packs) > count:
        raise ValueError(f"{len(packs)} bins are more than {count}")
    return packs


class TrainingRows(Dataset):
    """Rows of a tokenised data set as an epoch wants them: drawn anew, packed, or both; joined when they are asked for.

    Every epoch has the same number of rows, because trainers count their steps before the first.

    Args:
        dataset: rows of `input_ids`, `labels` and other columns.
        drawn: the rows of an epoch, by its number; default: all, in order.
        epochs: how many epochs there will be, by the number of rows of the first.
        lengths: of each row of `dataset`, in the measure of `capacity`.
        capacity: of a row with several documents; None: each row stays by itself.
        join: one row out of several; default `joined`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        drawn: Callable[[int], Sequence[int]] | None = None,
        epochs: Callable[[int], int] = lambda rows: 1,
        lengths: Sequence[int] = (),
        capacity: int | None = None,
        join: "Callable[[Sequence[dict[str, Any]]], dict[str, Any]] | None" = None,
    ) -> None:
        self.dataset, self.drawn, self.join = dataset, drawn, join or joined
        self.lengths, self.capacity = lengths, capacity
        first = len(self._packed(0))
        later = range(1, epochs(first)) if drawn else ()  # without a draw all epochs are alike
        self.count = max([first, *(len(self._packed(epoch)) for epoch in later)])
        # In shared memory: workers that load data live longer than an epoch.
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()
        self._laid_out: tuple[int, Packs] = (-1, [])

    def set_epoch(self, epoch: int) -> None:
        """Go to the rows of an epoch, in the workers of a loader too."""
        self.epoch.fill_(epoch)

    @property
    def packs(self) -> Packs:
        """Of this epoch, the rows of `dataset` that each row joins."""
        epoch = int(self.epoch)
        if epoch != self._laid_out[0]:
            # Where nothing is drawn all epochs are alike.
            packs = self._laid_out[1] if self._laid_out[1] and self.drawn is None else self._packed(epoch)
            self._laid_out = epoch, spread_over(packs, self.count)
        return self._laid_out[1]

    def _packed(self, epoch: int) -> Packs:
        rows = range(len(self.dataset)) if self.drawn is None else self.drawn(epoch)
        if self.capacity is None:
            return [[row] for row in rows]
        order, bounds = best_fit(np.asarray(self.lengths)[rows], self.capacity)
        chosen = np.asarray(rows)[order].tolist()
        return [chosen[start:end] for start, end in pairwise(bounds.tolist())]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = [self.dataset[row] for row in self.packs[index]]
        return self.join(rows) if self.capacity is not None else rows[0]


def row_lengths(dataset: Any, column: str) -> list[int]:
    """How long the list of each row is, without reading the lists."""
    import pyarrow.compute as pc

    found: list[int] = []
    for batch in dataset.with_format("arrow").iter(batch_size=10_000):
        found += pc.list_value_length(batch[column]).to_pylist()
    return found


def joined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Documents one after another: `input_ids`, `labels` and `position_ids`, which start again with each."""
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    for document in rows:
        row["input_ids"] += document["input_ids"]
        row["labels"] += [IGNORE, *document["labels"][1:]]
        row["position_ids"] += range(len(document["input_ids"]))
    return row


def joiner_of_pairs(start: int) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
    """A function that joins sources one after another, and their targets in the same order.

    Args:
        start: the token that a decoder starts each target from; a row as a whole would be shifted across documents.
    """

    def join(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        row: dict[str, list[int]] = {name: [] for name in (*_SOURCE, *_TARGET)}
        for pair in pairs:
            source, target = pair["input_ids"], pair["labels"]
            for name, values in zip(_SOURCE, (source, range(len(source))), strict=True):
                row[name] += values
            inputs, real = [start, *target[:-1]], [1] * len(target)
            for name, values in zip(_TARGET, (target, inputs, range(len(target)), real), strict=True):
                row[name] += values
        return row

    return join


_SOURCE = ("input_ids", "position_ids")
_TARGET = ("labels", "decoder_input_ids", "decoder_position_ids", "decoder_attention_mask")
