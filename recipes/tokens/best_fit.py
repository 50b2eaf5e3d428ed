"""Best-fit packing by lengths alone, of a few rows or a great many documents."""

from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class _Bins(NamedTuple):
    """Bins that are filled alike, one after another.

    Attributes:
        first, bins: numbers of the bins, in the order in which bins were opened.
        layers: (start, each): bin number `first + b` holds the items `start + b * each` to `start + (b + 1) * each`,
            counted from the longest item on.
    """

    first: int
    bins: int
    layers: tuple[tuple[int, int], ...]

    def split(self, bins: int) -> "tuple[_Bins, _Bins]":
        rest = tuple((start + bins * each, each) for start, each in self.layers)
        return self._replace(bins=bins), _Bins(self.first + bins, self.bins - bins, rest)


def best_fit(lengths: "np.ndarray[Any, Any]", size: int) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Which items share a row: best-fit decreasing (Ding et al. 2024, arXiv:2404.10830, section 2.2).

    Items go from the longest to the shortest, equal ones in their order, each into the fullest row that has room for
    it; of equally full rows into the one that became so first. The result is that of TRL's `pack_dataset`, row by row.

    Equal items are placed all at once: rows that are filled alike are one entry, so that time and memory of the search
    follow `size` and not the number of items.

    Args:
        lengths: [items], each from 1 to `size`.
        size: of a row.

    Returns:
        The items in the order of the rows, and [rows + 1] where each row begins among them; both int64.
    """
    import numpy as np

    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    counts = np.bincount(lengths, minlength=size + 1)
    room: dict[int, deque[_Bins]] = {}  # free places -> bins, those that came first to it in front
    spaces: list[int] = []  # the keys of `room`, ascending
    full: list[_Bins] = []
    item = opened = 0

    def put(group: _Bins, space: int) -> None:
        if space == 0:
            full.append(group)
            return
        if space not in room:
            room[space] = deque()
            insort(spaces, space)
        room[space].append(group)

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(spaces, length)
            space = spaces[at] if at < len(spaces) else size
            each = space // length  # as many as fit: what is left is then the tightest place for the next one
            wanted = left // each or 1
            each = min(each, left)
            if at < len(spaces):
                group = room[space].popleft()
                if group.bins > wanted:
                    group, rest = group.split(wanted)
                    room[space].appendleft(rest)
                if not room[space]:
                    del room[space], spaces[at]
            else:
                group = _Bins(opened, wanted, ())
                opened += wanted
            put(group._replace(layers=(*group.layers, (item, each))), space - each * length)
            item, left = item + group.bins * each, left - group.bins * each
    return _laid_out(by_length, [*full, *(group for waiting in room.values() for group in waiting)], opened)


def _laid_out(by_length: Any, groups: list[_Bins], rows: int) -> "tuple[Any, Any]":
    """The items row by row."""
    import numpy as np

    held = np.empty(rows, dtype=np.int64)
    for group in groups:
        held[group.first : group.first + group.bins] = sum(each for _, each in group.layers)
    bounds = np.concatenate([[0], np.cumsum(held)])
    order = np.empty(len(by_length), dtype=np.int64)
    for group in groups:
        begin = bounds[group.first]
        width = sum(each for _, each in group.layers)
        numbers = np.arange(group.bins)[:, None]
        items = [start + numbers * each + np.arange(each)[None] for start, each in group.layers]
        order[begin : begin + group.bins * width] = by_length[np.concatenate(items, axis=1).ravel()]
    return order, bounds


def parts(lengths: "np.ndarray[Any, Any]", size: int) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Items cut into parts of `size`, the last of each shorter.

    Returns:
        [parts] where each begins, counted from the beginning of its item, and [parts] the number of its item.
    """
    import numpy as np

    pieces = -(-lengths // size)
    owners = np.repeat(np.arange(len(lengths)), pieces)
    first = np.cumsum(pieces) - pieces
    return (np.arange(len(owners)) - first[owners]) * size, owners
