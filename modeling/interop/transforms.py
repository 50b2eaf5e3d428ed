"""Reversible changes of layout between foreign weights and ours: the vocabulary of the family tables.

Each names the foreign weights it reads, with `{layer}` for the layer number, and turns the list of their tensors into
the list of ours and back, bit for bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = list[torch.Tensor]


class Transform:
    """The identity on one weight; subclasses change the layout.

    Attributes:
        names: the foreign weights.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def to_ours(self, tensors: Tensors, config: Any) -> Tensors:
        """Our tensors, from the foreign ones in the order of `names`."""
        return tensors

    def to_theirs(self, tensors: Tensors, config: Any) -> Tensors:
        """The foreign tensors, in the order of `names`."""
        return tensors


class Transposed(Transform):
    """[in, out] <-> [out, in]: GPT-2's Conv1D."""

    def to_ours(self, tensors: Tensors, config: Any) -> Tensors:
        return [tensors[0].T.contiguous()]

    to_theirs = to_ours


class Reshaped(Transform):
    """A weight whose values are ours in another shape: our shape -> `to`, given as a function of config."""

    def __init__(self, name: str, ours: Callable[[Any], Sequence[int]], theirs: Callable[[Any], Sequence[int]]) -> None:
        super().__init__(name)
        self._ours, self._theirs = ours, theirs

    def to_ours(self, tensors: Tensors, config: Any) -> Tensors:
        return [tensors[0].reshape(*self._ours(config))]

    def to_theirs(self, tensors: Tensors, config: Any) -> Tensors:
        return [tensors[0].reshape(*self._theirs(config))]


class Split(Transform):
    """One foreign weight (or bias) that stacks several of ours along its outputs: halves, or `sizes(config)`.

    Args:
        name: the foreign weight.
        sizes: the outputs of each of ours; default: equal parts, as many as the table has names of ours.
        transposed: the foreign weight is stored [in, out].
    """

    def __init__(
        self, name: str, sizes: Callable[[Any], Sequence[int]] | None = None, parts: int = 2, transposed: bool = False
    ) -> None:
        super().__init__(name)
        self._sizes, self._parts, self._transposed = sizes, parts, transposed

    def to_ours(self, tensors: Tensors, config: Any) -> Tensors:
        whole = tensors[0].T if self._transposed and tensors[0].dim() == 2 else tensors[0]
        sizes = list(self._sizes(config)) if self._sizes else [len(whole) // self._parts] * self._parts
        return [part.contiguous() for part in whole.split(sizes)]

    def to_theirs(self, tensors: Tensors, config: Any) -> Tensors:
        whole = torch.cat(tensors)
        return [whole.T.contiguous() if self._transposed and whole.dim() == 2 else whole]


def qkv_sizes(config: Any) -> tuple[int, int, int]:
    """Outputs of the query, key and value projections."""
    key_value = config.num_key_value_heads * config.head_dim
    return config.num_attention_heads * config.head_dim, key_value, key_value


class GroupedQKV(Transform):
    """Query, key and value stacked group by group: [kv_heads, queries a group + 2, head_dim, ...].

    With one query head a group this is the [heads, 3, head_dim] of GPT-NeoX and BLOOM; with several, Falcon's.
    """

    def to_ours(self, tensors: Tensors, config: Any) -> Tensors:
        kv_heads, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        rest = tensors[0].shape[1:]
        grouped = tensors[0].view(kv_heads, group + 2, config.head_dim, *rest)
        query, key, value = grouped.split((group, 1, 1), dim=1)
        return [part.reshape(-1, *rest) for part in (query, key, value)]

    def to_theirs(self, tensors: Tensors, config: Any) -> Tensors:
        kv_heads, rest = config.num_key_value_heads, tensors[0].shape[1:]
        parts = [part.view(kv_heads, -1, config.head_dim, *rest) for part in tensors]
        return [torch.cat(parts, dim=1).reshape(-1, *rest)]
