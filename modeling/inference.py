"""Products of inference on CPUs, and what is prepared for them while text is generated.

Which kernels there are, and which is faster, is in `cpu_kernels.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .cpu_kernels import (
    columns_are_faster,
    is_faster,
    linear,
    of_columns,
    sorted_copy,
    sorting_is_faster,
    transposed_copy,
)
from .plain import is_plain

TYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW_ROWS = 64
# Single steps of a text after which copies of weights are made: they cost what they save in about as many. Behind a
# long prompt they are made at once, as its time is many times theirs, and where an answer may become long: few end
# before what they would have saved.
STEPS_BEFORE_COPIES = 12
LONG_ANSWER = 64
SMALLEST = 1 << 16  # values of a weight: below it the call itself is what takes time


def serves(states: torch.Tensor) -> bool:
    """Whether this is inference on a CPU that nobody traces, counts or casts."""
    if torch.is_grad_enabled() or states.device.type != "cpu" or type(states) is not torch.Tensor:
        return False
    if torch.compiler.is_compiling() or torch.utils._python_dispatch._len_torch_dispatch_stack():
        return False
    return not torch.is_autocast_enabled("cpu") and states.dtype in TYPES


def inference_products(layers: Sequence[nn.Module], states: torch.Tensor) -> Sequence[torch.Tensor] | None:
    """What each layer makes of states [..., inputs]: [..., outputs]; None where torch's own way is to be taken."""
    if not serves(states):
        return None
    rows = states.shape[:-1].numel()
    if GENERATION.texts and (product := GENERATION.product(layers)) is not None:
        if rows <= FEW_ROWS:
            return product.each(states)
        product.asked += rows // FEW_ROWS
    # As they are, weights in 16 bits are not read faster.
    return [_inferred(layer, states) for layer in layers] if states.dtype is torch.float32 else None


def _inferred(layer: Any, states: torch.Tensor) -> torch.Tensor:
    large = is_plain(layer) and layer.weight.dtype is torch.float32 and layer.weight.numel() >= SMALLEST
    # In this order: for small models nothing is measured.
    return linear(states, layer.weight, layer.bias) if large and is_faster(torch.float32) else layer(states)


class Sorted:
    """A copy of weights in the order in which oneDNN reads it."""

    most_rows = FEW_ROWS

    def __init__(self, *weights: torch.Tensor) -> None:
        self.weight = sorted_copy(*weights)

    def __call__(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(states, self.weight, bias)


class Columns:
    """A transposed copy of weights, whose columns are added up: in fp32."""

    most_rows = 1

    def __init__(self, *weights: torch.Tensor) -> None:
        self.columns = transposed_copy(*weights)

    def __call__(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = of_columns(states, self.columns)
        return (output if bias is None else output + bias).view(*states.shape[:-1], -1)


def kind_of_copy(dtype: torch.dtype, rows: int) -> type[Sorted] | type[Columns] | None:
    """The copies that weights of this type are read faster from for so many rows; None: there are none."""
    if dtype is torch.float32 and rows == 1 and columns_are_faster():
        return Columns
    return Sorted if sorting_is_faster(dtype) else None


class Product:
    """The product of few states with the weights of plain layers that read the same, for one generation.

    Args:
        layers: of one type; `is_plain`.
        prepared: says when copies are made, and whether there is room.
    """

    def __init__(self, layers: Sequence[Any], prepared: "Prepared") -> None:
        self.weights, self.biases = [x.weight for x in layers], [x.bias for x in layers]
        self.sizes = [x.out_features for x in layers]
        self.prepared, self.asked = prepared, 0
        self.dtype, large = self.weights[0].dtype, min(w.numel() for w in self.weights) >= SMALLEST
        by_onednn = large and self.dtype is torch.float32 and is_faster(self.dtype)
        self.without_copy = linear if by_onednn else nn.functional.linear
        self.may_copy = large
        self.copy: Sorted | Columns | None = None
        self.bias: torch.Tensor | None = None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., the outputs of all layers]."""
        if self.copy is not None and states.shape[:-1].numel() <= self.copy.most_rows:
            return self.copy(states, self.bias)
        parts = self._of_layers(states)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def each(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """[..., inputs] -> [..., outputs] of each layer."""
        if self.copy is not None and states.shape[:-1].numel() <= self.copy.most_rows:
            output = self.copy(states, self.bias)
            return (output,) if len(self.sizes) == 1 else output.split(self.sizes, dim=-1)
        return self._of_layers(states)

    def _of_layers(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Without a copy, which is made when it has been missed often enough."""
        self.asked += 1
        if self.may_copy and self.asked > self.prepared.steps_before_copies:
            self._copy(states.shape[:-1].numel())
        return [self.without_copy(states, w, b) for w, b in zip(self.weights, self.biases, strict=True)]

    def _copy(self, rows: int) -> None:
        """Copy what reads so many rows faster: that many are likely to come again."""
        self.asked, kind = 0, kind_of_copy(self.dtype, rows)
        if kind is None:  # for other numbers of rows there may be one
            return
        if not self.prepared.take(sum(w.nbytes for w in self.weights)):
            self.may_copy = False
            return
        self.copy = None  # which served one row, while drafts bring several
        if any(bias is not None for bias in self.biases):
            pairs = zip(self.weights, self.biases, strict=True)
            self.bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
        self.copy = kind(*self.weights)


class Prepared:
    """What is prepared for one `generate`, each with what it was made of, so that no other object gets its `id`."""

    def __init__(self) -> None:
        self.steps_before_copies = STEPS_BEFORE_COPIES
        self.forget()

    def expect(self, tokens: int) -> None:
        """An answer may have so many tokens."""
        if tokens >= LONG_ANSWER:
            self.steps_before_copies = 1  # a short prompt counts as one

    def forget(self) -> None:
        """Prepare all anew: weights have changed, or will."""
        self.products: dict[tuple[int, ...], tuple[Sequence[Any], Product | None]] = {}
        self.parts: dict[int, tuple[Any, Any]] = {}
        self.spare = -1  # bytes for copies; not looked up yet

    def take(self, size: int) -> bool:
        """Whether copies of so many bytes fit into a quarter of the memory that was free at the first."""
        if self.spare < 0:
            self.spare = spare_bytes() // 4
        fits = size <= self.spare
        self.spare -= size if fits else 0
        return fits


class Generation:
    """What is prepared while text is generated. Nothing of it outlives its `generate`, because weights, hooks and
    adapters may change after, and each thread has its own; a draft model shares that of the model it drafts for.
    """

    def __init__(self) -> None:
        self._current: ContextVar[Prepared | None] = ContextVar("generation", default=None)

    @contextmanager
    def begun(self) -> Iterator[Prepared]:
        if (outer := self._current.get()) is not None:
            yield outer
            return
        made = Prepared()
        token = self._current.set(made)
        try:
            yield made
        finally:
            self._current.reset(token)

    @property
    def texts(self) -> bool:
        """Whether text is generated here and now."""
        return self._current.get() is not None

    def expect(self, tokens: int) -> None:
        """An answer may have so many tokens; of no meaning where text is generated by other means than a head's."""
        if self.texts:
            self._now.expect(tokens)

    def prepared(self, owner: Any, make: Callable[[Any], Any]) -> Any:
        """What `make` makes of its owner, once."""
        parts = self._now.parts
        if id(owner) not in parts:
            parts[id(owner)] = owner, make(owner)
        return parts[id(owner)][1]

    def product(self, layers: Sequence[Any]) -> Product | None:
        """The one `Product` of these layers; None: they are more than their weights, or of several types."""
        now, key = self._now, tuple(map(id, layers))
        if key not in now.products:
            fits = all(map(is_plain, layers)) and len({x.weight.dtype for x in layers}) == 1
            now.products[key] = layers, Product(layers, now) if fits else None
        return now.products[key][1]

    @property
    def _now(self) -> Prepared:
        found = self._current.get()
        assert found is not None
        return found


GENERATION = Generation()


def spare_bytes() -> int:
    """Memory that can still be taken, by the machine and by the limit of this process's group; 0: not known."""
    found = []
    info = Path("/proc/meminfo")
    if info.is_file():
        available = [line for line in info.read_text().splitlines() if line.startswith("MemAvailable:")]
        found += [int(line.split()[1]) * 1024 for line in available]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()).isdigit():
        found.append(max(int(most) - int(used.read_text()), 0))
    return min(found, default=0)
