"""Cache layers of the one layer type that the library does not know, and windows that must keep everything."""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache, StaticLayer


class DynamicGlobalSlidingLayer(DynamicLayer):
    """Keeps every token: those outside the window may be global. Defining the class registers it."""

    _layer_type = "global_sliding_attention"


class StaticGlobalSlidingLayer(StaticLayer):
    """As above, of a fixed length."""

    _layer_type = "global_sliding_attention"


class CroppableEncoderDecoderCache(EncoderDecoderCache):
    """Takes back tokens of its decoder's part whatever that is; the library's refuses where it is a static one."""

    def crop(self, tokens_to_remove: int) -> None:
        self.self_attention_cache.crop(tokens_to_remove)


def keep_whole(cache: Cache, required: bool) -> None:
    """Make windowed layers keep every column: behind padding in the middle of a row, a window reaches further back.

    Args:
        required: there is such padding now; else there will be, if tokens follow the padding on the right.

    Raises:
        ValueError: required, and columns are gone already, or the cache has a fixed size.
    """
    own: Any = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    for index, layer in enumerate(own.layers):
        if not getattr(layer, "is_sliding", False):
            continue
        held = layer.keys.shape[-2] if layer.is_initialized else 0
        if not isinstance(layer, DynamicSlidingWindowLayer) or layer.cumulative_length != held:
            if not required:
                continue
            raise ValueError(
                "attention_mask has padding in the middle or on the right of a row, behind which a window reaches "
                "further back than this cache keeps: pad on the left, or use a dynamic cache"
            )
        whole = layer.whole() if hasattr(layer, "whole") else DynamicLayer()
        if held:
            whole.update(layer.keys, layer.values)
        own.layers[index] = whole


class HeldKeys:
    """Keys and values of earlier tokens that are read and not added to: what a checkpointed layer gets for a cache.

    Args:
        keys, values: [batch, heads, length, width].
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those held and the new ones."""
        return torch.cat((self.keys, keys), dim=-2), torch.cat((self.values, values), dim=-2)


def held_by(cache: Cache) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values in a decoder's cache, by layer; none where it is empty.

    Raises:
        ValueError: a cache that holds something is not a dynamic one.
    """
    own: Any = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    filled = {index: layer for index, layer in enumerate(own.layers) if layer.is_initialized}
    other = [type(layer).__name__ for layer in filled.values() if not isinstance(layer, DynamicLayer)]
    if other:
        raise ValueError(f"gradient checkpointing reads dynamic caches alone, and this one has layers of {other[0]}")
    return {index: (layer.keys, layer.values) for index, layer in filled.items()}
