"""Rows that hold several documents each, so that little of a batch is padding.

Documents stay whole and do not see each other: positions start again with each, and models keep apart what such
positions mark. The first token of a document is predicted by nothing, so loss and gradients are those of the same
documents in rows of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from .report import IGNORE

Packs = list[list[int]]


def best_fit(lengths: Sequence[int], capacity: int) -> Packs:
    """Put items into as few bins as best-fit decreasing finds: each, the longest first, goes where least room is left.

    It needs at most 11/9 of the fewest possible, and 4 more (D. S. Johnson et al., SIAM J. Comput. 3, 1974).

    Args:
        lengths: of the items.
        capacity: of a bin; no item may be longer.

    Returns:
        The items of each bin, by number. Equal lengths keep their order, so the result depends on nothing else.

    Raises:
        ValueError: an item is longer than a bin.
    """
    packs: Packs = []
    with_room: dict[int, list[int]] = {}  # room left -> bins that have just so much
    rooms = 0  # bit n is set where with_room[n] holds a bin
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[item]
        if length > capacity:
            raise ValueError(f"item {item} has length {length}, a bin holds {capacity}")
        fitting = rooms >> length
        room = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
        if fitting:
            pack = with_room[room].pop()
            rooms ^= (not with_room[room]) << room
        else:
            pack = len(packs)
            packs.append([])
        packs[pack].append(item)
        left = room - length
        with_room.setdefault(left, []).append(pack)
        rooms |= 1 << left
    return packs


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
        drawn: the rows of an epoch by its number, of which each has `drawn(0)`'s number; default: all, in order.
        epochs: how many there will be.
        lengths: of each row of `dataset`, in the measure of `capacity`.
        capacity: of a row with several documents; None: each row stays by itself.
        join: one row out of several; default `joined`.

    Attributes:
        packs: of this epoch, the rows of `dataset` that each row joins.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        drawn: Callable[[int], Sequence[int]] | None = None,
        epochs: int = 1,
        lengths: Sequence[int] = (),
        capacity: int | None = None,
        join: "Callable[[Sequence[dict[str, Any]]], dict[str, Any]] | None" = None,
    ) -> None:
        self.dataset, self.drawn, self.join = dataset, drawn, join or joined
        self.lengths, self.capacity = lengths, capacity
        self.count = 0
        # Without a draw all epochs are alike.
        self.count = max(len(self._packed(epoch)) for epoch in range(max(epochs, 1) if drawn else 1))
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the rows of an epoch."""
        self.packs = spread_over(self._packed(epoch), self.count)

    def _packed(self, epoch: int) -> Packs:
        rows = range(len(self.dataset)) if self.drawn is None else self.drawn(epoch)
        if self.capacity is None:
            return [[row] for row in rows]
        packs = best_fit([self.lengths[row] for row in rows], self.capacity)
        return [[rows[place] for place in pack] for pack in packs]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = [self.dataset[row] for row in self.packs[index]]
        return self.join(rows) if self.capacity is not None else rows[0]


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


def follow_epochs(trainer: Any, rows: TrainingRows) -> None:
    """Let the trainer's epochs be those of its rows, also after a resume."""
    from transformers import TrainerCallback

    class FollowEpochs(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rows.set_epoch(int(state.epoch or 0))

    trainer.add_callback(FollowEpochs())
