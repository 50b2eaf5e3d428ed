"""A cache in 8 bits, which needs no other package: `cache_implementation="quantized"` where no backend is named."""

from typing import Any

import torch
from transformers.cache_utils import BaseQuantizedLayer, DynamicCache

from .growing_cache import GrowingCache, GrowingSlidingLayer, Room


class Int8Layer(BaseQuantizedLayer):
    """Keys and values of each token and head as whole numbers from -127 to 127 with one scale (absmax quantisation).

    A scale a token lets a token be added without touching the others, as the layers of groups along the text cannot
    (KIVI, arXiv:2402.02750, keeps its newest tokens unquantised for that). What attention reads is unpacked for the
    length of a step.
    """

    is_croppable = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.rooms = Room(), Room(), Room(), Room()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = (*self._quantize(key_states), *self._quantize(value_states))
        if torch.is_grad_enabled():
            kept = [
                torch.cat(pair, -2) if pair[0] is not None else pair[1] for pair in zip(self._kept, new, strict=True)
            ]
        else:
            pairs = zip(self.rooms, self._kept, new, strict=True)
            kept = [room.append(x[:, :, :0] if held is None else held, x, None) for room, held, x in pairs]
        self._kept = kept
        self.cumulative_length = kept[0].shape[-2]
        past = self.cumulative_length - key_states.shape[-2]
        # The new ones are seen as they are, as under the library's quantised caches.
        keys, values = self._dequantize(kept[:2], key_states.dtype), self._dequantize(kept[2:], value_states.dtype)
        return torch.cat((keys[:, :, :past], key_states), -2), torch.cat((values[:, :, :past], value_states), -2)

    @property
    def _kept(self) -> list[Any]:
        """Numbers and scales [batch, heads, length, width or 1] of keys, then of values; None before the first."""
        return [*(self._quantized_keys or (None, None)), *(self._quantized_values or (None, None))]

    @_kept.setter
    def _kept(self, tensors: list[torch.Tensor]) -> None:
        self._quantized_keys, self._quantized_values = tuple(tensors[:2]), tuple(tensors[2:])

    def _quantize(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (tensor.abs().amax(-1, keepdim=True).float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, pair: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (pair[0] * pair[1]).to(dtype)

    def _change(self, how: Any) -> None:
        if self.get_seq_length():
            self._kept = [how(tensor) for tensor in self._kept]
            self.cumulative_length = self._kept[0].shape[-2]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give a negative number, of the tokens to be removed")
        if tokens_to_remove:
            self._change(lambda tensor: tensor[:, :, :tokens_to_remove])
            for room, held in zip(self.rooms, self._kept, strict=True):
                room.shorten(held)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._change(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change(lambda tensor: tensor[indices])

    def reset(self) -> None:
        super().reset()
        self.rooms = Room(), Room(), Room(), Room()


class Int8Cache(DynamicCache):
    """The cache whose layers keep all tokens in 8 bits; those that keep a window keep it as it is.

    A dynamic one: the library asks for that before it selects or cuts what belongs to a decoder with an encoder.

    Args:
        config: an `AnyformerConfig`.
    """

    def __init__(self, config: Any) -> None:
        own = GrowingCache(config).layers
        super().__init__(config=config)
        self.layers = [layer if isinstance(layer, GrowingSlidingLayer) else Int8Layer() for layer in own]

    def __repr__(self) -> str:
        from .cache_sizes import measured_size

        return f"{type(self).__name__}({len(self.layers)} layers, {measured_size(self)})"
