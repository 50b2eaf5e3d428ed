"""Who sees whom: attention masks by layer type, from the library's mask builders, and the positions of keys."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import (
    and_masks,
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
)
from transformers.utils.import_utils import is_tracing

from .cache_layers import keep_whole
from .configuration_anyformer import AnyformerConfig

REAL_INDICES = "real_indices"  # among masks by layer type; no layer has it as its type


def attention_masks(
    config: AnyformerConfig,
    layer_types: Iterable[str],
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    cache: Cache | None = None,
    documents: torch.Tensor | None = None,
    causal: bool = True,
    positions: torch.Tensor | None = None,
) -> dict[str, Any]:
    """One mask for each layer type, in the form that the attention implementation wants.

    Args:
        inputs_embeds: [batch, length, ...]: only its sizes, type and device are read.
        attention_mask: [batch, past + length], 1 for real tokens; a mask that is built already serves every type.
        documents: [batch, length], the number of the packed document that each token belongs to.
        causal: tokens see only those before them.
        positions: [batch, past + length], of all keys, where packed documents share what is cached; see
            `positions_behind_prefix`.
    """
    if (
        isinstance(attention_mask, torch.Tensor)
        and attention_mask.dim() == 4
        and not attention_mask.is_floating_point()
    ):
        attention_mask = attention_mask.bool()  # a kernel would add 1 and 0
    if causal and documents is None:
        ready = _of_one_query(config, layer_types, inputs_embeds, attention_mask, cache)
        if ready is not None:
            return ready
    packed = None if documents is None else packed_sequence_mask_function(documents)
    if documents is not None and positions is not None:
        packed = _behind_prefix(documents, positions.shape[1] - documents.shape[1])
    arguments: dict[str, Any] = {"config": config, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
    arguments["cache"] = cache  # an encoder's holds the prefix that it was tuned with, if there is one
    if causal:
        # Without positions: the library would look for packed documents in them, by rules that let them leak.
        arguments["position_ids"] = None
        full, sliding = create_causal_mask, create_sliding_window_causal_mask
    else:
        full, sliding = create_bidirectional_mask, create_bidirectional_sliding_window_mask
    types = set(layer_types)
    windows = any("sliding" in t for t in types)
    counted = (real_indices(attention_mask) if positions is None else positions) if windows else None
    if windows and cache is not None and _padding_follows(attention_mask):
        keep_whole(cache, required=counted is not None)
    if counted is not None and cache is not None:
        counted = _as_wide_as(counted, max(sum(sizes) for sizes in _key_columns(cache, inputs_embeds.shape[1])))
    masks = {}
    for layer_type in types:
        if layer_type == "sliding_attention" and counted is None:
            masks[layer_type] = sliding(**arguments, and_mask_function=packed)
            continue
        parts = [packed] if packed is not None else []
        if layer_type == "global_sliding_attention":
            # Behind a prefix the first tokens are the prefix's, for all documents.
            own = documents if positions is None else None
            parts.append(_window_and_globals(config, inputs_embeds, attention_mask, own, counted, causal))
        elif layer_type == "sliding_attention":
            parts.append(_window(config, counted, causal))
        masks[layer_type] = full(**arguments, and_mask_function=and_masks(*parts) if parts else None)
    return masks


def _of_one_query(
    config: AnyformerConfig, layer_types: Iterable[str], inputs_embeds: torch.Tensor, attention_mask: Any, cache: Any
) -> dict[str, Any] | None:
    """The masks of one query that sees all its layer gives it, so that a token needs none built; None: build them."""
    own: Any = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if inputs_embeds.shape[1] != 1 or not isinstance(own, DynamicCache) or is_tracing(inputs_embeds):
        return None
    types = set(layer_types)
    if "global_sliding_attention" in types or len(own.layers) < config.num_hidden_layers:
        return None
    pairs: Any = zip(own.layers, config.layer_types, strict=False)
    if "sliding_attention" in types and not all(x.is_sliding for x, kind in pairs if kind == "sliding_attention"):
        return None  # a layer that keeps everything needs its window hidden
    if attention_mask is None:
        return dict.fromkeys(types)
    if not _is_plain(config, attention_mask):
        return None
    mask = attention_mask.bool()
    if mask.device.type == "cpu" and mask.all():
        return dict.fromkeys(types)
    if "sliding_attention" in types and _padding_follows(mask):
        return None
    row = _row(mask, inputs_embeds)
    keys = {kind: own.get_mask_sizes(1, config.layer_types.index(kind))[0] for kind in types}
    return {kind: row[..., -count:] for kind, count in keys.items()}


def mask_of_source(
    config: AnyformerConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    encoder_hidden_states: torch.Tensor,
    same: Callable | None,
) -> Any:
    """The mask of cross-attention, in the form that the attention implementation wants.

    Args:
        inputs_embeds: [batch, length, hidden_size], the decoder's.
        attention_mask: [batch, source], 1 for real tokens of the encoder's.
        same: see `same_document`.
    """
    one = inputs_embeds.shape[1] == 1 and same is None and not is_tracing(inputs_embeds)
    if one and _is_plain(config, attention_mask) and attention_mask.shape[1] == encoder_hidden_states.shape[1]:
        mask = attention_mask.bool()
        if mask.device.type == "cpu" and mask.all():
            return None
        if mask.any(-1).all():  # of a source that is all padding nothing is to be seen, which numbers do not say
            return _row(mask, inputs_embeds)
    return create_bidirectional_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        encoder_hidden_states=encoder_hidden_states,
        and_mask_function=same,
    )


def _is_plain(config: AnyformerConfig, attention_mask: Any) -> bool:
    """Whether a mask is of tokens, and the attention implementation takes it for one query as it is."""
    two = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
    return two and config._attn_implementation in ("eager", "sdpa")


def _row(mask: torch.Tensor, inputs_embeds: torch.Tensor) -> torch.Tensor:
    """[batch, keys], true for what is seen -> [batch, 1, 1, keys]; on CPUs numbers to be added, which each layer would
    make of it otherwise."""
    mask = mask.to(inputs_embeds.device)[:, None, None, :]
    if mask.device.type != "cpu":
        return mask
    hidden = torch.finfo(inputs_embeds.dtype).min
    return torch.zeros_like(mask, dtype=inputs_embeds.dtype).masked_fill_(~mask, hidden)


def _behind_prefix(documents: torch.Tensor, past: int) -> Callable:
    """True within a document [batch, length] and for the `past` keys before all of them."""
    whose = nn.functional.pad(documents, (past, 0), value=-1)

    def same(batch, head, query, key):
        return (whose[batch, key] == -1) | (whose[batch, query] == whose[batch, key])

    return same


def _window(config: AnyformerConfig, counted: torch.Tensor | None, causal: bool) -> Callable:
    """True inside the window, in tokens of the row: where a mask has holes they are `counted`, [batch, columns]."""
    width = config.sliding_window

    def near(batch, head, query, key):
        if counted is not None:
            query, key = counted[batch, query], counted[batch, key]
        return key > query - width if causal else (query - key <= width) & (key - query <= width)

    return near


def _window_and_globals(
    config: AnyformerConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    documents: torch.Tensor | None,
    counted: torch.Tensor | None,
    causal: bool,
) -> Callable:
    """True inside the window and for the first tokens of a row or document (Longformer, arXiv:2004.05150, sec. 3.1)."""
    count, near = config.num_global_tokens, _window(config, counted, causal)
    first = _first_real(inputs_embeds, attention_mask)  # [batch]
    if documents is None:

        def is_global(batch, index):
            if counted is not None:
                return counted[batch, index] < count
            return (index >= first[batch]) & (index < first[batch] + count)
    else:
        length = documents.shape[-1]
        index = torch.arange(length, device=documents.device).expand_as(documents)
        new = nn.functional.pad(documents.diff(dim=-1) != 0, (1, 0), value=True)
        start = index.masked_fill(~new, 0).cummax(dim=-1).values.clamp(min=first[:, None])  # of each token's document
        marked = (index >= start) & (index < start + count)  # [batch, length]

        def is_global(batch, index):
            return marked[batch, index]

    def seen(batch, head, query, key):
        inside = near(batch, head, query, key) | is_global(batch, key)
        return inside if causal else inside | is_global(batch, query)

    return seen


def _first_real(inputs_embeds: torch.Tensor, attention_mask: Any) -> torch.Tensor:
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        return attention_mask.to(inputs_embeds.device).long().argmax(dim=-1)
    return torch.zeros(inputs_embeds.shape[0], dtype=torch.long, device=inputs_embeds.device)


def _padding_follows(attention_mask: Any) -> bool:
    """Whether a row of a 2-D mask has padding behind a real token."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2 or is_tracing(attention_mask):
        return False
    return bool((attention_mask.bool().long().diff(dim=-1) < 0).any())


def real_indices(attention_mask: Any) -> torch.Tensor | None:
    """Of each column its index among the real tokens, [batch, columns], where a 2-D mask has holes; else None.

    Padding on one side changes no distance, and indices in the row serve. Masks that are built already say nothing of
    padding, so who builds them ahead of the model puts this beside them, as `REAL_INDICES`.
    """
    if isinstance(attention_mask, dict):
        return attention_mask.get(REAL_INDICES)
    if is_tracing(attention_mask):  # nothing may depend on values: counting is right with and without holes
        two = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0) if two else None
    if not _padding_follows(attention_mask):
        return None
    real = attention_mask.bool()
    holes = real.long().cumsum(-1) * ~real * real.flip(-1).long().cumsum(-1).flip(-1)
    return (real.long().cumsum(-1) - 1).clamp(min=0) if holes.any() else None


def _key_columns(cache: Cache, length: int) -> list[tuple[int, int]]:
    """Number of keys and index of the first, layer by layer, once `length` tokens more are cached."""
    return [cache.get_mask_sizes(length, layer) for layer in range(len(cache))] or [(length, 0)]


def _as_wide_as(counted: torch.Tensor, columns: int) -> torch.Tensor:
    """Places of a static cache that hold nothing yet: they lie behind every query, whatever their index."""
    return nn.functional.pad(counted, (0, max(columns - counted.shape[1], 0)))


def positions_for_bias(
    layer: int,
    hidden_states: torch.Tensor,
    attention_mask: Any,
    cache: Cache | None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [batch or 1, queries] and [batch or 1, keys], as the attention of that layer sees them.

    Distances are all that biases depend on: where a document starts does not change them. Holes in a mask do, so
    positions are counted over the real tokens there.

    Args:
        positions: as of `attention_masks`.
    """
    length, device = hidden_states.shape[1], hidden_states.device
    if positions is not None:
        return positions[:, -length:], positions
    past, keys, offset = 0, length, 0
    if cache is not None:
        keys, offset = cache.get_mask_sizes(length, layer)
        past = cache.get_seq_length(layer)
    counted = real_indices(attention_mask)
    if counted is not None:
        counted = counted.to(device)
        return counted[:, -length:], _as_wide_as(counted, offset + keys)[:, offset : offset + keys]
    queries = torch.arange(length, device=device) + past
    return queries[None], torch.arange(keys, device=device)[None] + offset


def same_document(queries: torch.Tensor | None, keys: torch.Tensor | None) -> Callable | None:
    """Mask function of cross-attention between packed documents: the n-th of the queries sees the n-th of the keys.

    Args:
        queries: [batch, length], keys: [batch, source]: document numbers, or None where nothing is packed.

    Raises:
        ValueError: one side is packed and the other is not.
    """
    if queries is None and keys is None:
        return None
    if queries is None or keys is None:
        raise ValueError(
            "only one side of this encoder-decoder is packed: pass position_ids and decoder_position_ids that start "
            "again with each document"
        )
    return lambda batch, head, query, key: queries[batch, query] == keys[batch, key]


def check_width(attention_mask: Any, past: Any, inputs_embeds: torch.Tensor) -> None:
    """Raises:
    ValueError: a 2-D mask that has not a column for each token, cached ones included.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2 or not isinstance(past, int):
        return
    wanted = past + inputs_embeds.shape[1]
    if attention_mask.shape[1] != wanted:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} columns for {past} cached and {inputs_embeds.shape[1]} new "
            f"tokens: pass one of [batch, {wanted}]"
        )


def positions_of(attention_mask: Any, past: Any, inputs_embeds: torch.Tensor) -> torch.Tensor:
    """Positions [batch or 1, length] of the new tokens, counted over the real ones where a 2-D mask tells."""
    length = inputs_embeds.shape[1]
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=inputs_embeds.device) + past).unsqueeze(0)


def lengths_of(position_ids: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """Tokens of the text that each token stands in, as far as it goes: [batch or 1, 1], packed [batch, length].

    Args:
        position_ids: [batch or 1, length]; documents: [batch, length], their numbers, or None.
    """
    if documents is None:
        return position_ids.amax(dim=-1, keepdim=True) + 1
    position_ids = position_ids.expand_as(documents)
    last = torch.zeros_like(position_ids).scatter_reduce(-1, documents, position_ids, "amax")  # by document
    return last.gather(-1, documents) + 1


def positions_behind_prefix(position_ids: torch.Tensor, documents: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Positions [batch, past + length] of the keys of packed documents that all go on from what is cached.

    Args:
        position_ids: [batch, length], which start at `past` in each document.
        documents: [batch, length], their numbers.

    Raises:
        ValueError: a document starts elsewhere: it would follow other documents.
    """
    past = cache.get_seq_length()
    position_ids = position_ids.expand_as(documents)
    starts = nn.functional.pad(documents.diff(dim=-1) != 0, (1, 0), value=True)
    if not past or bool((position_ids[starts] != past).any()):
        raise ValueError(
            "Packed documents (position_ids that start again) cannot follow a cache, but for a prefix that they share: "
            f"let the positions of each start behind its {past} tokens, or drop the cache"
        )
    prefix = torch.arange(past, device=position_ids.device).expand(position_ids.shape[0], -1)
    return torch.cat([prefix, position_ids], dim=-1)


def packed_lengths(documents: torch.Tensor, attention_mask: Any) -> dict[str, Any]:
    """What variable-length attention wants to know of packed rows, which it reads one after another.

    Args:
        documents: [batch, length], document numbers; padding, by a 2-D `attention_mask`, is a document of its own.
    """
    length = documents.shape[-1]
    new = nn.functional.pad(documents.diff(dim=-1) != 0, (1, 0), value=True)  # [batch, length]
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        new |= nn.functional.pad(attention_mask[:, -length:].diff(dim=-1) != 0, (1, 0))
    starts = new.flatten().nonzero().flatten()
    bounds = nn.functional.pad(starts, (0, 1), value=new.numel()).to(torch.int32)  # [documents + 1]
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def packed_documents(
    position_ids: torch.Tensor | None, attention_mask: Any, inputs_embeds: torch.Tensor
) -> torch.Tensor | None:
    """The document number [batch, length] of each token, or None where no row holds more than one document.

    The library sees packing only without a mask and without a cache, and lets documents see each other otherwise.
    While tracing, where nothing may depend on values, the numbers always come.
    """
    batch, length = inputs_embeds.shape[:2]
    if position_ids is None or position_ids.dim() != 2 or length == 1:
        return None
    position_ids = position_ids.expand(batch, -1)
    starts = position_ids.diff(dim=-1) <= 0  # [batch, length - 1]: token i + 1 starts a document
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
            return None
        real = attention_mask[:, -length:].bool()
        index = torch.arange(length, device=real.device).expand_as(real)
        last = index.masked_fill(~real, 0).cummax(dim=-1).values[:, :-1]  # the real token before each
        # Across padding, positions may jump ahead within a document, but never back.
        restarts = (position_ids[:, 1:] <= position_ids.gather(-1, last)) & (real.cumsum(dim=-1)[:, :-1] > 0)
        starts = torch.where(real[:, :-1], starts, restarts) & real[:, 1:]
    if not is_tracing(starts) and not starts.any():
        return None
    return nn.functional.pad(starts.cumsum(dim=-1), (1, 0))
