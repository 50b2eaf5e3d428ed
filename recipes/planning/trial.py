"""A training step on tensors without storage, and what it would hold at each moment.

Only the storages of tensors are counted: what a kernel needs while it works, and what an allocator rounds up or cannot
join, is not.
"""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...modeling import linear
from ...modeling import plain as plain_layers
from .fake_model import FakeModel, build
from .optimizers import make_optimizer
from .setting import Setting

aten = torch.ops.aten


@dataclass
class Segment:
    """What happens to memory between two moments.

    Attributes:
        delta: bytes that are held more at its end than at its start.
        peak: the most that is held more within it.
        flops: of matrix products, as torch's own counter counts them; pairs: those of them that grow with the square
            of the length.
    """

    delta: int = 0
    peak: int = 0
    flops: int = 0
    pairs: int = 0


@dataclass
class Trial:
    """The segments of a step, for the layers that were tried.

    Attributes:
        fake: the model.
        before: from the start to the first layer; forward: of each layer, by (stack, slot), with what stands behind
            it; loss: from the last layer through the head and back to the last layer; backward: as forward.
        update: the optimiser's.
        state: bytes of the optimiser's state by id of the parameter.
    """

    fake: FakeModel
    before: Segment = field(default_factory=Segment)
    forward: dict[tuple[int, int], Segment] = field(default_factory=dict)
    loss: Segment = field(default_factory=Segment)
    backward: dict[tuple[int, int], Segment] = field(default_factory=dict)
    update: Segment = field(default_factory=Segment)
    state: dict[int, int] = field(default_factory=dict)


def _grouped_flops(left: Any, right: Any, *given: Any, out_val: Any = None, **options: Any) -> int:
    """Of stacked experts, each of which multiplies its tokens."""
    return 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]


# Of kernels that torch's counter leaves out.
_FORMULAS: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    aten._grouped_mm: _grouped_flops,
}
# How code asks whether all of a mask is true, and whether a value lies beyond a bound.
_WHETHER_ALL = {aten.all.default, aten.eq.Scalar}
_WHETHER_BEYOND = {aten.ge.Scalar, aten.gt.Scalar}
# Products of each position with each other one.
_OF_PAIRS = {
    aten.bmm,
    aten.baddbmm,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
}


def _formula_of(func: Any) -> Any:
    packet = getattr(func, "_overloadpacket", None)
    return _FORMULAS.get(packet) or flop_registry.get(packet)


class Ledger(TorchDispatchMode):
    """Counts FLOPs and the bytes of all storages that are alive, and answers what tensors without values cannot.

    Args:
        supervised: share of labels that are learned from.
        padding: whether a mask has holes.
    """

    def __init__(self, supervised: float, padding: str) -> None:
        super().__init__()
        self.supervised, self.padding = supervised, padding
        self.live = self.peak = self.flops = self.pairs = 0
        self._known: dict[int, int] = {}
        self._answers: dict[int, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._answer(func, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        if (formula := _formula_of(func)) is not None:
            flops = formula(*args, **(kwargs or {}), out_val=result)
            self.flops += flops
            self.pairs += flops * (func._overloadpacket in _OF_PAIRS)
        if func in _WHETHER_ALL and not result.dim():
            self._answers[result.untyped_storage()._cdata] = self.padding == "none"
        elif func in _WHETHER_BEYOND and not result.dim():
            self._answers[result.untyped_storage()._cdata] = False
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.hold(tensor)
        return result

    def _answer(self, func: Any, args: Any) -> Any:
        if func is aten.nonzero.default:  # of labels
            mask = args[0]
            return mask.new_empty((round(mask.numel() * self.supervised), mask.dim()), dtype=torch.long)
        if func is aten._local_scalar_dense.default:
            (value,) = args
            if getattr(value, "constant", None) is not None:
                return value.constant.item()
            answer = self._answers.get(value.untyped_storage()._cdata, True)
            return answer if value.dtype == torch.bool else 1.0 if value.is_floating_point() else 1
        if func is aten.scatter_add.default:  # of the gradient of `gather`, in place but for tensors of other classes
            return aten.scatter_add_.default(*args)
        if func is aten._grouped_mm.default:  # whose check without storage takes 16 bits alone
            left, right = args[0], args[1]
            if left.dim() == 2 and right.dim() == 2:
                return left.new_empty((args[2].shape[0], left.shape[0], right.shape[1]))
            return left.new_empty((*left.shape[:-1], right.shape[-1]))
        return None

    def hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = size = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._known.pop(key)
        self._answers.pop(key, None)

    def taken(self, since: int) -> Segment:
        """What happened since the ledger held `since` bytes and was last asked."""
        segment = Segment(self.live - since, self.peak - since, self.flops, self.pairs)
        self.peak, self.flops, self.pairs = self.live, 0, 0
        return segment


def _fused_on_gpu(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The attention kernel that GPUs have for any mask and width of values; on a processor torch takes another."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


@contextlib.contextmanager
def _as_if_real(setting: Setting) -> Iterator[None]:
    """Code takes the way of tensors that have values, on the device of the setting."""
    from torch._subclasses.fake_tensor import FakeTensor
    from transformers.utils import import_utils

    functions: Any = nn.functional
    replaced: list[tuple[Any, str, Any]] = [
        (import_utils, "is_fake_tensor", lambda tensor: False)
    ]  # which would mean that a graph is traced
    if setting.kernels == "gpu" or setting.attention not in ("eager", "sdpa"):
        # A mode would not reach the layers that are computed again.
        replaced.append((functions, "scaled_dot_product_attention", _fused_on_gpu))
    if setting.kernels == "gpu":
        replaced.append((linear, "SLOW_IN_16_BITS", False))
    kept = [(where, name, getattr(where, name)) for where, name, _ in replaced]
    plain_layers.PLAIN.add(FakeTensor)
    for where, name, value in replaced:
        setattr(where, name, value)
    try:
        yield
    finally:
        plain_layers.PLAIN.discard(FakeTensor)
        for where, name, value in kept:
            setattr(where, name, value)


def try_step(setting: Setting, extra: int = 0) -> Trial:
    """Go through one step of a setting.

    Args:
        extra: see `fake_model.build`.

    Raises:
        UserError: an adapter that the model cannot have, or an optimiser that is not known.
    """
    fake = build(setting, extra)
    fake.model.train()
    if setting.loss == "log_probs":
        _fuse_head(fake.model)
    if setting.checkpointing == "layers":
        fake.model.gradient_checkpointing_enable({"use_reentrant": False})
        if setting.adapter.kind not in ("none", "freeze"):
            fake.model.enable_input_require_grads()
    ledger = Ledger(setting.supervised, setting.padding)
    with fake.mode, _as_if_real(setting):
        for tensor in (*fake.model.parameters(), *fake.model.buffers()):
            ledger.hold(tensor)
        with ledger:
            if setting.accumulation > 1:  # of a second pass gradients are there already
                _pass(Trial(fake), setting, ledger)
            trial = Trial(fake)
            _pass(trial, setting, ledger)
            _update(trial, setting, ledger)
    return trial


def _fuse_head(model: Any) -> None:
    """As TRL's trainers of DPO and KTO do."""
    from peft import PeftModel
    from trl.trainer.utils import add_fused_lm_head

    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "mean_logits"))


class _Marks:
    """Cuts a pass into segments, at each layer forward and backward."""

    def __init__(self, trial: Trial, ledger: Ledger) -> None:
        self.trial, self.ledger = trial, ledger
        self.segment_of: Any = lambda segment: setattr(trial, "before", segment)
        self.level = ledger.live
        ledger.taken(self.level)

    def next(self, into: Any) -> None:
        """Close the segment; the next one is given to `into`."""
        segment = self.ledger.taken(self.level)
        self.level = self.ledger.live
        self.segment_of(segment)
        self.segment_of = into

    def forward(self, key: tuple[int, int]) -> None:
        self.next(lambda segment: self.trial.forward.__setitem__(key, segment))

    def backward(self, key: tuple[int, int]) -> None:
        self.next(lambda segment: self.trial.backward.__setitem__(key, segment))

    def last(self) -> None:
        self.next(lambda segment: setattr(self.trial, "loss", segment))


def _pass(trial: Trial, setting: Setting, ledger: Ledger) -> None:
    """Forward and backward."""
    marks, stacks = _Marks(trial, ledger), trial.fake.stacks
    plain_classes = []
    for number, stack in enumerate(stacks):
        for slot, layer in enumerate(stack.layers):
            plain_classes.append((layer, type(layer)))
            ends = number == len(stacks) - 1 and slot == len(stack.layers) - 1
            layer.__class__ = _marked(type(layer), marks, (number, slot), ends)
    try:
        loss = _loss(trial.fake.model, setting)
        loss.backward()
        del loss
        marks.next(lambda segment: None)
    finally:
        for layer, cls in plain_classes:
            layer.__class__ = cls


def _marked(cls: type, marks: _Marks, key: tuple[int, int], ends: bool) -> type:
    """A layer's class that also tells of each call from outside, and of the gradient of what it gives."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        marks.forward(key)
        output = cls.__call__(self, *args, **kwargs)
        if output.requires_grad:
            output.register_hook(lambda grad: marks.backward(key))
        if ends:
            marks.last()
        return output

    return type(cls.__name__, (cls,), {"__call__": call})


def _loss(model: Any, setting: Setting) -> torch.Tensor:
    """What a trainer's step computes on a batch: the loss, while the outputs exist no longer."""
    arguments = _batch(setting)
    mixed = setting.mixed != "no"
    dtype = getattr(torch, setting.mixed) if mixed else torch.bfloat16
    with torch.autocast("cpu", dtype=dtype, enabled=mixed):
        outputs = model(**arguments)
    if setting.head == "base":
        return outputs.last_hidden_state.float().sum()
    if setting.loss in ("logits", "answers"):
        logits = outputs.logits.float() if mixed else outputs.logits
        return _of_whole_logits(logits, arguments["input_ids"], likelihood=setting.loss == "logits")
    if mixed:  # Accelerate hands out what the model gives in fp32
        held = [value.float() for value in outputs.values() if _is_narrow(value)]
        del held
    return (outputs["log_probs"].sum() if setting.loss == "log_probs" else outputs["loss"]).float()


def _batch(setting: Setting) -> dict[str, Any]:
    """Arguments of the model."""
    rows = torch.ones(setting.batch, setting.length, dtype=torch.long)
    arguments: dict[str, Any] = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows}
    if setting.head == "seq2seq_lm":
        source = torch.ones(setting.batch, setting.source or setting.length, dtype=torch.long)
        arguments |= {"input_ids": source, "attention_mask": torch.ones_like(source)}
    elif setting.head == "sequence_classification":
        arguments["labels"] = torch.ones(setting.batch, dtype=torch.long)
    elif setting.head == "pretraining":
        arguments["next_sentence_label"] = torch.ones(setting.batch, dtype=torch.long)
    elif setting.head == "base":
        del arguments["labels"]
    if setting.loss == "log_probs":
        arguments["fused_lm_head"] = True
    elif setting.loss in ("logits", "answers"):
        del arguments["labels"]
    elif setting.head in ("causal_lm", "masked_lm", "seq2seq_lm", "pretraining"):
        arguments["num_items_in_batch"] = torch.ones((), dtype=torch.long)
    if setting.head in ("causal_lm", "seq2seq_lm"):
        arguments["use_cache"] = False
    return arguments


def _of_whole_logits(logits: torch.Tensor, rows: torch.Tensor, *, likelihood: bool) -> torch.Tensor:
    """What TRL's trainers of ORPO, CPO and SimPO compute of the logits [rows, length, vocabulary]; chosen answers come
    first."""
    from trl.trainer.utils import selective_log_softmax

    chosen, loss = logits[: len(rows) // 2], logits.new_zeros(())
    if likelihood:
        labels = rows[: len(rows) // 2, 1:].contiguous().view(-1)
        loss = nn.functional.cross_entropy(chosen[:, :-1].contiguous().view(-1, logits.shape[-1]), labels)
    return loss + selective_log_softmax(logits[:, :-1], rows[:, 1:]).sum()


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _update(trial: Trial, setting: Setting, ledger: Ledger) -> None:
    """The optimiser's step: what it keeps for each parameter, and what it takes beside."""
    model = trial.fake.model
    optimizer = make_optimizer(setting.optimizer, model, on_gpu=setting.kernels == "gpu")
    level = ledger.live
    ledger.taken(level)
    state = optimizer.first_step(model)
    trial.state = state.bytes
    segment = ledger.taken(level)
    trial.update = Segment(0, max(segment.peak - segment.delta, 0) if optimizer.tried else state.beside)
