"""Attention of grouped queries on a CPU without copies of keys and values.

torch's kernel for CPUs knows no groups: `enable_gqa`, and the library where there is a mask, repeat keys and values for
every query head, which while a token is generated costs more than the attention itself.
"""

from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# What the library's function reads of an attention module whose groups are dealt with.
_UNGROUPED: Any = SimpleNamespace(num_key_value_groups=1)


def shares_keys(query: torch.Tensor, groups: int) -> bool:
    """Whether `grouped_sdpa` is to be called: what learns keeps to the library's way, and so do traces."""
    return (
        groups > 1 and query.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    )


def grouped_sdpa(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As the library's `sdpa_attention_forward`; the heads of a group read one view of their keys and values.

    Args:
        query: [batch, heads, q, head_dim]; key, value: [batch, kv_heads, k, width].
        attention_mask: [batch, 1, q, k] or None; position_bias: [batch or 1, heads, q or 1, k] or None.

    Returns:
        Output [batch, q, heads, width] and None.
    """
    batch, heads, length, _ = query.shape
    shared, groups = key.shape[1], heads // key.shape[1]
    if length == 1:  # the heads of a group are the queries of one head
        query = query.reshape(batch, shared, groups, -1)
        if position_bias is not None:
            position_bias = position_bias.reshape(-1, shared, groups, position_bias.shape[-1])
        output, _ = sdpa_attention_forward(
            _UNGROUPED, query, key, value, attention_mask, position_bias=position_bias, **kwargs | {"is_causal": False}
        )
        return output.transpose(1, 2).reshape(batch, 1, heads, -1), None
    # Each key head is a row of the batch, whose query heads see it by a stride of 0.
    query = query.reshape(batch * shared, groups, length, -1)
    key, value = (x.reshape(batch * shared, 1, *x.shape[2:]).expand(-1, groups, -1, -1) for x in (key, value))
    attention_mask, position_bias = (
        None if x is None else _by_key_head(x, batch, shared, groups) for x in (attention_mask, position_bias)
    )
    kwargs.setdefault("is_causal", module.is_causal)
    output, _ = sdpa_attention_forward(
        _UNGROUPED, query, key, value, attention_mask, position_bias=position_bias, **kwargs
    )
    width = output.shape[-1]  # [batch * shared, q, groups, width]
    return output.view(batch, shared, length, groups, width).transpose(1, 2).reshape(batch, length, heads, width), None


def _by_key_head(x: torch.Tensor, batch: int, shared: int, groups: int) -> torch.Tensor:
    """[batch or 1, heads or 1, q, k] -> [batch * shared or 1, groups or 1, q, k]."""
    if x.shape[0] == x.shape[1] == 1:
        return x
    heads = (shared, groups) if x.shape[1] > 1 else (1, 1)
    split = x.view(x.shape[0], *heads, *x.shape[2:])
    return split.expand(batch, shared, *split.shape[2:]).flatten(0, 1)
