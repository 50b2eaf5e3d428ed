"""The cache of generation: keys and values lie in buffers with room, so that a token copies only itself.

`torch.cat`, as in the library's dynamic cache, copies the whole context for every token and layer.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .cache_layers import DynamicGlobalSlidingLayer

STEP = 64  # buffers hold a multiple of so many tokens


class Room:
    """A buffer [batch, heads, capacity, width], at whose end what is held grows in place.

    What is held is a view of it. Who crops takes a shorter view, and the buffer follows; who reorders, selects or moves
    makes a tensor of its own, and the next token finds the buffer left and takes a new one.
    """

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.end = 0  # of what was written into it
        # What `append` gave last and where it begins: held again, nothing has to be looked up.
        self.last: tuple[torch.Tensor | None, int] = None, 0

    def append(self, held: torch.Tensor, new: torch.Tensor, longest: int | None) -> torch.Tensor:
        """`held` [batch, heads, past, width] followed by `new` [batch, heads, length, width], as one view.

        Args:
            longest: no buffer needs more tokens than this, unless more are there.
        """
        if held is self.last[0] and (grown := self._behind_last(new)) is not None:
            return grown
        past = held.shape[-2] if held.numel() else 0
        need, start = past + new.shape[-2], self.place_of(held) if past else 0
        if past and held.shape[:2] != new.shape[:2]:
            raise ValueError(
                f"the cache holds {held.shape[0]} rows of {held.shape[1]} heads, and {new.shape[0]} rows of "
                f"{new.shape[1]} follow: begin with an empty cache, or repeat or select its rows"
            )
        # A cache that was copied from this one may have written behind what is held, or taken another buffer.
        shared = bool(past) and (start is None or start + past != self.end)
        full = self.buffer is None or start is None or start + need > self.buffer.shape[-2]
        if full or shared or self._is_foreign(new):
            start = self._make_room(held, new, past, need, longest, anew=shared)
        buffer: Any = self.buffer
        start = start or 0
        buffer[:, :, start + past : start + need] = new
        self.end = start + need
        grown = buffer[:, :, start : start + need]
        self.last = grown, start
        return grown

    def _behind_last(self, new: torch.Tensor) -> torch.Tensor | None:
        """What was given last, followed by `new`; None: there is no room, something else stands there, or it is of
        another kind."""
        buffer: Any = self.buffer
        last: Any
        (last, start), length = self.last, new.shape[2]
        place = start + last.shape[2]
        end = place + length
        if buffer is None or place != self.end or end > buffer.shape[2] or self._is_foreign(new):
            return None
        buffer.narrow(2, place, length).copy_(new)
        self.end = end
        grown = buffer.narrow(2, start, end - start)
        self.last = grown, start
        return grown

    def reorder(self, held: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The rows of `held` in another order, in the same place."""
        chosen = held.index_select(0, rows.to(held.device))
        stays = chosen.shape == held.shape and self.place_of(held) is not None and not self._is_foreign(chosen)
        return held.copy_(chosen) if stays and not torch.is_grad_enabled() else chosen

    def shorten(self, held: torch.Tensor | None) -> None:
        """What stood behind `held` is given up."""
        if held is not None and held.numel() and (start := self.place_of(held)) is not None:
            self.end = start + held.shape[-2]

    @property
    def nbytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes

    def _is_foreign(self, new: torch.Tensor) -> bool:
        buffer: Any = self.buffer
        sizes = new.shape[0], new.shape[1], new.shape[3]
        if (buffer.shape[0], buffer.shape[1], buffer.shape[3]) != sizes:
            return True
        if buffer.is_inference() and not torch.is_inference_mode_enabled():  # torch lets nobody write into it
            return True
        return buffer.dtype != new.dtype or buffer.device != new.device

    def place_of(self, held: torch.Tensor) -> int | None:
        """The place in the buffer where `held` begins; None: it lies elsewhere."""
        buffer = self.buffer
        if buffer is None or held.shape[:2] != buffer.shape[:2] or held.stride() != buffer.stride():
            return None
        offset = held.data_ptr() - buffer.data_ptr()
        step = buffer.stride(2) * buffer.element_size()
        return offset // step if 0 <= offset < step * buffer.shape[2] and offset % step == 0 else None

    def _make_room(
        self, held: torch.Tensor, new: torch.Tensor, past: int, need: int, longest: int | None, anew: bool
    ) -> int:
        """Put what is held to the front of a buffer that has room for `need`; where it begins, which is 0."""
        old = self.buffer
        if not anew and old is not None and not self._is_foreign(new) and 2 * need <= old.shape[-2]:
            if past:  # copied aside, because the two places may overlap
                old[:, :, :past] = held.clone()
            return 0
        self.buffer = new.new_empty(*new.shape[:2], capacity_for(need, past, longest), new.shape[3])
        if past:
            self.buffer[:, :, :past] = held
        return 0


def capacity_for(need: int, past: int, longest: int | None = None) -> int:
    """Tokens that a buffer is made for: twice the `past` ones or `need`, but no more than the `longest` text needs."""
    wanted = max(need + 1, 2 * past)
    if longest is not None:
        wanted = max(need, min(wanted, longest))
    return -(-wanted // STEP) * STEP


def _grows_in_place(keys: torch.Tensor) -> bool:
    """Whether a buffer may be written into: autograd would find what it saved changed, traces see no addresses."""
    return not torch.is_grad_enabled() and type(keys) is torch.Tensor and not torch.compiler.is_compiling()


class GrowingLayer(DynamicLayer):
    """Keeps every token. Twice the room is taken whenever it is full, so that a token costs a constant share of copies.

    Args:
        longest: the longest text that is to be expected, in tokens: no room is taken beyond it.
    """

    def __init__(self, longest: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.longest = longest
        self.rooms = Room(), Room()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _grows_in_place(key_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self.rooms[0].append(self.keys, key_states, self.longest)
        self.values = self.rooms[1].append(self.values, value_states, self.longest)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """As the base class, within the buffers: they would be taken anew for every token otherwise."""
        if self.get_seq_length():
            self.keys, self.values = (
                room.reorder(held, beam_idx) for room, held in zip(self.rooms, (self.keys, self.values), strict=True)
            )

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        for room, held in zip(self.rooms, (self.keys, self.values), strict=True):
            room.shorten(held)

    def reset(self) -> None:
        super().reset()
        self.rooms = Room(), Room()

    def offload(self) -> None:
        super().offload()
        self.rooms = Room(), Room()


class GrowingSlidingLayer(GrowingLayer, DynamicSlidingWindowLayer):
    """Keeps the `sliding_window - 1` tokens that the next one sees, in a buffer of twice the window."""

    is_sliding = True

    def __init__(self, sliding_window: int, **kwargs: Any) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window)
        self.longest, self.rooms = 2 * sliding_window, (Room(), Room())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _grows_in_place(key_states):
            return DynamicSlidingWindowLayer.update(self, key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[-2]
        self.cumulative_length += length
        states = key_states, value_states
        if self.record_past:  # nothing may be dropped before `crop`
            pairs = zip(self.rooms, (self.keys, self.values), states, strict=True)
            self.keys, self.values = (room.append(held, new, None) for room, held, new in pairs)
            seen = self.sliding_window - 1 + length
            return self.keys[:, :, -seen:], self.values[:, :, -seen:]
        pairs = zip(self.rooms, (self.keys, self.values), states, strict=True)
        full_keys, full_values = (self._extended(room, held, new) for room, held, new in pairs)
        self.keys, self.values = (
            self._last(room, full) for room, full in zip(self.rooms, (full_keys, full_values), strict=True)
        )
        return full_keys, full_values

    def whole(self) -> GrowingLayer:
        """An empty layer that keeps what this one would drop."""
        return GrowingLayer()

    def _extended(self, room: Room, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """All that the new tokens see. Long texts are joined beside the buffer, which stays at its bound."""
        if not held.numel():
            return new
        if held.shape[-2] + new.shape[-2] > 2 * self.sliding_window:
            return torch.cat((held, new), dim=-2)
        return room.append(held, new, self.longest)

    def _last(self, room: Room, full: torch.Tensor) -> torch.Tensor:
        """The tokens that are kept, in the buffer."""
        kept = full[:, :, max(full.shape[-2] - self.sliding_window + 1, 0) :]
        if room.place_of(kept) is not None:
            return kept
        room.buffer = None
        empty = kept[:, :, :0]
        return room.append(empty, kept, self.longest)


class GrowingGlobalSlidingLayer(GrowingLayer):
    """As `DynamicGlobalSlidingLayer`, which keeps every token too."""


_GROWING: dict[type, type[GrowingLayer]] = {
    DynamicLayer: GrowingLayer,
    DynamicSlidingWindowLayer: GrowingSlidingLayer,
    DynamicGlobalSlidingLayer: GrowingGlobalSlidingLayer,
}


class GrowingCache(DynamicCache):
    """A dynamic cache whose layers grow in place.

    Args:
        config: an `AnyformerConfig`, whose `layer_types` say what each layer keeps.
        longest: the longest text that is to be expected, in tokens; None: not known.
    """

    def __init__(self, config: Any, longest: int | None = None) -> None:
        super().__init__(config=config)
        layer: Any
        for index, layer in enumerate(self.layers):
            if cls := _GROWING.get(type(layer)):
                sizes = {"sliding_window": layer.sliding_window} if layer.is_sliding else {"longest": longest}
                self.layers[index] = cls(**sizes)

    def __repr__(self) -> str:
        from .cache_sizes import measured_size

        return f"{type(self).__name__}({len(self.layers)} layers, {measured_size(self)})"
