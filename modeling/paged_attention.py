"""Attention of continuous batching: each request over its own keys.

The library lays the tokens of all requests into one row and masks from each the keys of the others: for n requests that
is n times the work, and grouped keys are copied for each of their queries.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers.utils.import_utils import is_tracing

_sdpa = nn.functional.scaled_dot_product_attention

# Of the cache's rows this one is never written: keys of padding are read from it.
UNUSED_ROW = 0

# Keys of a text up to which the requests of a pass attend in one call.
SHORT = 1024

# Where shapes may follow values: elsewhere each look at one waits for the device, and no graph can be captured.
SEPARATING = ("cpu",)


def separates_requests(tensor: torch.Tensor) -> bool:
    """Whether the requests of a pass over such tensors are told apart; else the library's mask alone does it."""
    return tensor.device.type in SEPARATING


class RequestBatch:
    """A pass in which each request has one new token: requests become the rows of a batch, which every kind of
    attention knows; to the layers it is their cache.

    Attributes:
        masks: by layer type, [requests, 1, 1, keys], true where there is a key; None: everywhere.
    """

    def __init__(self, cache: Any, position_ids: torch.Tensor, paging: dict[str, Any]) -> None:
        self.cache, self.paging = cache, dict(paging)
        self.position_ids = position_ids.T  # [requests, 1]
        self.masks: dict[str, torch.Tensor | None] = {}
        self.lengths: dict[str, torch.Tensor] = {}  # of keys, [requests, 1]
        self.places: dict[str, list[Any] | None] = {}  # see `_places`
        reads = list(paging["read_index"])
        for kind, ends in paging["cu_seq_lens_k"].items():
            place = cache.cache_allocators[kind].index
            starts = ends[:-1, None].long()
            lengths = ends.long().diff()[:, None]
            column = torch.arange(int(lengths.max()), device=ends.device)  # [keys]
            held = column < lengths  # [requests, keys]
            row = reads[place][(starts + column).clamp(max=len(reads[place]) - 1)]
            self.places[kind] = self._places(kind, reads[place], ends)
            reads[place] = row.masked_fill(~held, UNUSED_ROW).flatten()
            self.lengths[kind] = lengths
            self.masks[kind] = None if bool(held.all()) else held[:, None, None]
        self.paging["read_index"] = reads
        # With nothing to read the library writes alone.
        self.writing = self.paging | {"read_index": [r[:0] for r in reads]}

    @staticmethod
    def _places(kind: str, rows: torch.Tensor, ends: torch.Tensor) -> list[Any] | None:
        """Where each request's keys lie: a slice where they follow one another, on one page, else their rows; None
        where the keys of all are gathered: of windows, whose pages are written after they are read, and of short texts
        of like lengths, for which calls cost more than copies."""
        spans = list(pairwise(ends.tolist()))
        longest, together = max(b - a for a, b in spans), spans[-1][1]
        if kind != "full_attention" or (longest <= SHORT and longest * len(spans) <= 2 * together):
            return None
        first, last = (rows[ends[a:b].long() - c].tolist() for a, b, c in ((0, -1, 0), (1, None, 1)))
        return [
            slice(f, g + 1) if g - f == b - a - 1 else rows[a:b]
            for f, g, (a, b) in zip(first, last, spans, strict=True)
        ]

    @property
    def layers(self) -> list["RequestLayer"]:
        """What the layers of a flat step keep their keys in."""
        return [RequestLayer(self, index) for index in range(len(self.cache.layer_to_allocator))]

    def get_seq_length(self) -> int:
        """Of the longest request, with the token of this pass."""
        return int(self.position_ids.max()) + 1

    @staticmethod
    def fits(position_ids: torch.Tensor, paging: dict[str, Any]) -> bool:
        """Whether each request of this pass has one new token, all have earlier ones, and shapes may follow values."""
        if not separates_requests(position_ids):
            return False
        reads = paging.get("read_index") or [torch.empty(0)]
        if paging.get("block_table") is not None or is_tracing(position_ids) or not all(len(r) for r in reads):
            return False
        # One more index than requests; padded passes have more rows than they write.
        return len(paging["cu_seq_lens_q"]) - 1 == position_ids.shape[1] and paging["max_length_q"] == 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new [requests, kv_heads, 1, width] and give all, [requests, kv_heads, keys, width]."""
        requests = keys.shape[0]
        keys, values = (x.transpose(0, 2) for x in (keys, values))  # the library's: [1, kv_heads, tokens, width]
        keys, values = self.cache.update(keys, values, layer, kwargs=dict(self.paging))
        keys, values = (x[0].unflatten(1, (requests, -1)).transpose(0, 1) for x in (keys, values))
        return keys, values

    def positions(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [requests, 1] of the queries and [requests, keys] of the keys, as layers of that type see them."""
        lengths = self.lengths[kind]
        column = torch.arange(int(lengths.max()), device=lengths.device)
        return self.position_ids, self.position_ids - (lengths - 1) + column


class RequestLayer:
    """One layer of a `RequestBatch`."""

    def __init__(self, batch: RequestBatch, index: int) -> None:
        self.batch, self.index = batch, index

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """Keep the new keys and values [requests, kv_heads, 1, width]; what the queries make of all, as their shape.

        Args:
            query: [requests, kv_heads, group, width], the heads of a group as queries of one head.
            mask: of the batch.
        """
        allocator = self.batch.cache.layer_to_allocator[self.index]
        places = self.batch.places[allocator.layer_type]
        if places is None:
            keys, values = self.batch.update(keys, values, self.index, {})
            return _sdpa(query, keys, values, attn_mask=mask, scale=scale)
        # Read where they lie: to gather the keys of all takes half as long as the attention itself.
        new = (x.transpose(0, 2) for x in (keys, values))
        self.batch.cache.update(*new, self.index, kwargs=dict(self.batch.writing))
        kept = [pages.flatten(0, 1) for pages in allocator.get_cache_for_block_table(self.index)]  # [rows, kv_heads, .]
        outputs = []
        for request, place in enumerate(places):
            key, value = (rows[place] if isinstance(place, slice) else rows.index_select(0, place) for rows in kept)
            key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
            outputs.append(_sdpa(query[request : request + 1], key, value, scale=scale))
        return torch.cat(outputs)


def by_request(attend: Callable, cu_seq_lens_q: torch.Tensor, cu_seq_lens_k: torch.Tensor) -> Callable:
    """An attention function that takes the requests of a row one after another.

    Args:
        attend: an attention function of the library's kind.
        cu_seq_lens_q, cu_seq_lens_k: [requests + 1], cumulative numbers of queries and keys from 0.
    """
    queries, keys = (
        [slice(*ends) for ends in pairwise(lengths.tolist())] for lengths in (cu_seq_lens_q, cu_seq_lens_k)
    )

    def attend_each(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        outputs = []
        for q, k in zip(queries, keys, strict=True):
            if position_bias is not None:
                kwargs["position_bias"] = position_bias[..., q, k]
            mask = attention_mask[..., q, k]
            outputs.append(attend(module, query[:, :, q], key[:, :, k], value[:, :, k], mask, **kwargs)[0])
        return torch.cat(outputs, dim=1), None  # [1, queries, heads, width]

    return attend_each
