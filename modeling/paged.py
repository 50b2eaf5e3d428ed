"""Continuous batching: what the library's paged cache asks of a model, and what cannot be exact under it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache

from .configuration_anyformer import AnyformerConfig
from .soft_prompts import soft_prompt_of


def is_paged(cache: Any) -> bool:
    """Whether this is the cache of continuous batching: one row of the tokens of many requests."""
    return cache is not None and not isinstance(cache, Cache)


def paged_positions(
    position_ids: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor, keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [1, queries] and [1, keys] in a row of many requests, whose last key is each one's last query.

    Args:
        position_ids: [1, queries]; query_ends, key_ends: [requests + 1], cumulative lengths from 0.
    """
    last = position_ids[0, (query_ends[1:].long() - 1).clamp(min=0)]  # [requests]
    ends = key_ends[1:].long().contiguous()
    index = torch.arange(keys, device=position_ids.device)
    request = torch.searchsorted(ends, index, right=True).clamp(max=len(ends) - 1)
    return position_ids, (last[request] - (ends[request] - 1 - index))[None]


class PagedGeneration:
    """`generate_batch` and continuous batching, exact or refused; stands before `GenerationMixin` among the bases."""

    config: AnyformerConfig

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class.

        Raises:
            ValueError: the paged cache cannot serve this config exactly.
        """
        soft = ["it would run without its soft prompt"] if soft_prompt_of(self) is not None else []
        for problem in [*soft, *_problems(self.config)]:
            raise ValueError(f"continuous batching cannot serve this model: {problem}; use `generate`")
        with _cache_sizes(self.config):
            manager = super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]
            if manager.batch_processor is None:  # the cache is made here, from the sizes that the config shows now
                manager.warmup()
        return manager


def _problems(config: AnyformerConfig) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it has no place for an encoder"
    if "global_sliding_attention" in config.layer_types:
        yield "it drops what leaves a window, global tokens too (layer_types holds 'global_sliding_attention')"
    for kind in ("dynamic", "longrope"):
        if f"'{kind}'" in str(config.rope_parameters):
            yield f"rope_type={kind!r} turns by the length of a text, and requests of all lengths share a pass"


@contextmanager
def _cache_sizes(config: AnyformerConfig) -> Iterator[None]:
    """Show the sizes of what is cached where the paged cache looks for those of keys and values."""
    if config.attention != "mla":
        yield
        return
    sizes = config.num_key_value_heads, config.head_dim
    config.num_key_value_heads, config.head_dim = 1, max(config.kv_lora_rank, config.qk_rope_head_dim)
    try:
        yield
    finally:
        config.num_key_value_heads, config.head_dim = sizes
