"""What a cache takes: measured on its tensors, and predicted from the config."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import BaseQuantizedLayer, Cache, EncoderDecoderCache

from .counting import cached_values
from .growing_cache import GrowingLayer
from .quantized_cache import Int8Layer


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a cache.

    Attributes:
        held: of the keys and values that attention reads; of a static cache all its places, of a quantised one its
            numbers, their scales and what is not quantised yet.
        taken: of the memory behind them; a growing cache has room for tokens that are yet to come.
    """

    held: int
    taken: int

    def __str__(self) -> str:
        room = f", with room for more in {self.taken:,}" if self.taken > self.held else ""
        return f"{self.held:,} bytes{room}"


def measured_size(cache: Cache) -> CacheSize:
    """What the tensors of a cache take, the encoder's keys and values included."""
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    sizes = [_of_layer(layer) for part in parts for layer in part.layers]
    return CacheSize(sum(held for held, _ in sizes), sum(taken for _, taken in sizes))


def _of_layer(layer: Any) -> tuple[int, int]:
    tensors = [layer.keys, layer.values]
    if isinstance(layer, BaseQuantizedLayer) and layer.is_initialized:
        tensors += [layer._quantized_keys, layer._quantized_values]
    held = sum(_nbytes(tensor) for tensor in tensors)
    if isinstance(layer, (GrowingLayer, Int8Layer)) and (taken := sum(room.nbytes for room in layer.rooms)):
        return held, taken
    return held, held


def _nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in what a quantiser made."""
    if isinstance(value, torch.Tensor):
        inner = [getattr(value, name) for name in getattr(value, "__tensor_flatten__", lambda: ([], None))()[0]]
        return sum(map(_nbytes, inner)) if inner else value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


def predicted_size(
    config: Any,
    tokens: int,
    *,
    batch: int = 1,
    bytes_per_value: int = 4,
    source: int = 0,
    places: int | None = None,
    quantized: bool = False,
) -> int:
    """Bytes that a cache holds behind `tokens` tokens: `measured_size(...).held`, from the config alone.

    2 * kv_heads * head_dim values a token and layer; latent attention keeps kv_lora_rank + qk_rope_head_dim; a window
    bounds its layers at sliding_window - 1 tokens, and an encoder's keys and values are held once.

    Args:
        source: tokens that the encoder has read.
        places: of a static cache: the tokens it is made for, all of which it holds from the start; a window bounds its
            layers at sliding_window.
        quantized: in 8 bits, with a scale of 4 bytes a token and head; windows are not.
    """
    heads = 1 if config.attention == "mla" else config.num_key_value_heads
    plain = cached_values(config) * bytes_per_value
    total = 0
    for kind in config.layer_types:
        kept, token = tokens if places is None else places, plain
        if kind == "sliding_attention":
            kept = min(kept, config.sliding_window - (places is None))
        elif quantized:
            token = cached_values(config) + 2 * heads * 4
        total += kept * token
    if config.architecture == "encoder-decoder":
        width = config.qk_head_dim or config.head_dim
        crossing = 2 * config.num_key_value_heads * width * config.num_hidden_layers
        total += source * crossing * bytes_per_value
    return total * batch
