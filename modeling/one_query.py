"""Attention of one query on a CPU, as while a token is generated.

torch's kernel takes one task for a key head and multiplies few rows at once, which reads keys and values at a fraction
of what memory gives. Over many keys it is faster to multiply all queries of a key head at once and to add up values as
rows of a table, which is what an embedding bag is.
"""

import functools

import torch
from torch import nn

from .cpu_kernels import TERMS, least_seconds, weighted_sums

# Fewer keys cost less than the calls do.
MANY_KEYS = 1024
# What is measured: what holds for so many heads holds for more.
MOST_HEADS, MEASURED_KEYS, VALUES_MEASURED = 16, 4096, 1 << 24


def attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Attention whose queries are those of one place: the heads of a group, as queries of their key head.

    Args:
        query: [batch, kv_heads, group, head_dim]; key, value: [batch, kv_heads, keys, width].
        mask: what scaled_dot_product_attention takes, or None; scale: None for head_dim ** -0.5.

    Returns:
        [batch, kv_heads, group, width].
    """
    many = mask is None and key.shape[2] >= MANY_KEYS
    if many and query.dtype is key.dtype is value.dtype is torch.float32 and not torch.is_autocast_enabled("cpu"):
        shape = key.shape[0] * key.shape[1], query.shape[2], key.shape[3], value.shape[3]
        if (steps := row_steps(value)) is not None and sums_are_faster(*shape):
            return by_sums(query, key, value, key.shape[3] ** -0.5 if scale is None else scale, steps)
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def by_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, steps: tuple[int, int]
) -> torch.Tensor:
    """As `attend_one`; steps: the `row_steps` of the values."""
    batch, heads, keys, width = value.shape
    group = query.shape[2]
    weights = torch.matmul(query * scale, key.transpose(-1, -2)).softmax(-1)  # [batch, heads, group, keys]
    rows = value.as_strided(((batch * heads - 1) * steps[0] + (keys - 1) * steps[1] + 1, width), (width, 1))
    sums = weighted_sums(rows, *_places(batch * heads, group, keys, steps), weights.reshape(-1))
    return sums.view(batch, heads, group, -1, width).sum(3)


def row_steps(value: torch.Tensor) -> tuple[int, int] | None:
    """How many rows of one table lie from the values of a head to the next head's, and from a value to the next.

    Args:
        value: [batch, heads, keys, width].

    Returns:
        None where they are not rows of one table.
    """
    batch, heads, keys, width = value.shape
    next_head = value.stride(1) if heads > 1 else value.stride(0) if batch > 1 else 0
    next_value = value.stride(2)
    even = batch == 1 or heads == 1 or value.stride(0) == heads * next_head
    whole = value.stride(3) == 1 and next_head % width == 0 and next_value % width == 0
    counted = batch * heads * next_head + keys * next_value < 2**31  # in 32 bits
    return (next_head // width, next_value // width) if even and whole and counted else None


@functools.lru_cache(maxsize=16)
def _places(heads: int, group: int, keys: int, steps: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the rows of each query's values, and where its sums start, of `TERMS` values at most."""
    rows = torch.arange(heads, dtype=torch.int32)[:, None, None] * steps[0]
    rows = rows + torch.arange(keys, dtype=torch.int32) * steps[1]
    starts = torch.arange(heads * group, dtype=torch.int32)[:, None] * keys
    starts = starts + torch.arange(0, keys, TERMS, dtype=torch.int32)
    return rows.expand(heads, group, keys).reshape(-1), starts.reshape(-1)


def sums_are_faster(heads: int, group: int, head_dim: int, width: int) -> bool:
    """Whether `by_sums` is faster than torch's kernel; measured once a process, shape and number of threads."""
    return _sums_are_faster(min(heads, MOST_HEADS), group, head_dim, width, torch.get_num_threads())


@functools.cache
def _sums_are_faster(heads: int, group: int, head_dim: int, width: int, threads: int) -> bool:
    # Of so many layers that most processors' caches do not hold them, as they do not hold a model.
    layers = max(1, VALUES_MEASURED // (heads * MEASURED_KEYS * (head_dim + width)))
    with torch.inference_mode():
        query = torch.ones(1, heads, group, head_dim)
        key, value = (torch.ones(layers, 1, heads, MEASURED_KEYS, size) for size in (head_dim, width))
        pairs = list(zip(key, value, strict=True))
        ours = functools.partial(by_sums, scale=1.0, steps=(MEASURED_KEYS, 1))
        theirs = functools.partial(nn.functional.scaled_dot_product_attention, scale=1.0)
        seconds = least_seconds(lambda: [ours(query, k, v) for k, v in pairs])
        return least_seconds(lambda: [theirs(query, k, v) for k, v in pairs]) > seconds
