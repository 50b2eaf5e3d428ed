"""Rows in batches, as a tokenizer is given them."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
BATCH = 512


def batches(items: Iterable[T], size: int = BATCH) -> Iterator[list[T]]:
    """Lists of `size` items in their order, the last one shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
