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

# Of the cache's rows this one is never written: keys of padding are read from it.
UNUSED_ROW = 0


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
        reads = list(paging["read_index"])
        for kind, ends in paging["cu_seq_lens_k"].items():
            place = cache.cache_allocators[kind].index
            starts = ends[:-1, None].long()
            lengths = ends.long().diff()[:, None]
            column = torch.arange(int(lengths.max()), device=ends.device)  # [keys]
            held = column < lengths  # [requests, keys]
            row = reads[place][(starts + column).clamp(max=len(reads[place]) - 1)]
            reads[place] = row.masked_fill(~held, UNUSED_ROW).flatten()
            self.lengths[kind] = lengths
            self.masks[kind] = None if bool(held.all()) else held[:, None, None]
        self.paging["read_index"] = reads

    @staticmethod
    def fits(position_ids: torch.Tensor, paging: dict[str, Any]) -> bool:
        """Whether each request of this pass has one new token, all have earlier ones, and shapes may follow values."""
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
