"""What an optimiser keeps for each parameter: by its first step where torch or this project has it, else by a table."""

import difflib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UserError

# Bytes a value of the state of optimisers that are not tried: those of other packages. 8-bit states have a scale in
# fp32 for each block of 256 values (Dettmers et al. 2021, arXiv:2110.02861), and small tensors keep fp32.
_PACKED = 1 + 4 / 256
STATES: dict[str, float] = {
    "adamw_bnb_8bit": 2 * _PACKED,
    "adamw_8bit": 2 * _PACKED,
    "paged_adamw_8bit": 2 * _PACKED,
    "lion_8bit": _PACKED,
    "paged_lion_8bit": _PACKED,
    "rmsprop_bnb_8bit": _PACKED,
    "ademamix_8bit": 3 * _PACKED,
    "paged_ademamix_8bit": 3 * _PACKED,
    "adamw_torch_8bit": 2 * _PACKED,
    "adamw_torch_4bit": 2 * (0.5 + 4 / 128),
    "paged_adamw_32bit": 8.0,
    "adamw_anyprecision": 8.0,
    "adamw_apex_fused": 8.0,
    "lion_32bit": 4.0,
    "paged_lion_32bit": 4.0,
    "rmsprop_bnb": 4.0,
    "rmsprop_bnb_32bit": 4.0,
    "ademamix": 12.0,
    "paged_ademamix_32bit": 12.0,
}
_SMALL = 4096  # values of a tensor whose state bitsandbytes leaves in fp32
TRIED = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "muon")


@dataclass
class State:
    """Attributes:
    bytes: by id of the parameter. beside: the most that a step takes beside it, where it was not tried.
    """

    bytes: dict[int, int]
    beside: int = 0


@dataclass
class PlannedOptimizer:
    """An optimiser whose state is to be known.

    Attributes:
        made: the optimiser; None where a table says what it keeps.
        a_value: bytes a value of its state, of the table.
    """

    made: Any = None
    a_value: float = 0.0

    @property
    def tried(self) -> bool:
        return self.made is not None

    def first_step(self, model: Any) -> State:
        """Make the step that creates the state, with the gradients that are there."""
        trained = [p for p in model.parameters() if p.requires_grad and p.grad is not None]
        if self.made is None:
            narrow = self.a_value < 4
            return State(
                {id(p): round(p.numel() * (8 if narrow and p.numel() < _SMALL else self.a_value)) for p in trained}
            )
        with torch.no_grad():
            self.made.step()
        states = self.made.state
        return State({id(p): sum(_nbytes(value) for value in states[p].values()) for p in trained if p in states})


def _nbytes(value: Any) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


def bytes_a_value(name: str, dtype: torch.dtype) -> float:
    """What is kept for each value that is trained, where the weights' shapes are not looked at: as for a square matrix;
    of an optimiser that is not known, as of AdamW."""
    model: Any = nn.utils.skip_init(nn.Linear, 256, 256, bias=False, dtype=dtype)  # which takes no random numbers
    nn.init.zeros_(model.weight)
    model.weight.grad = torch.zeros_like(model.weight)
    known = name if name in TRIED or name in STATES else "adamw_torch"
    state = make_optimizer(known, model, on_gpu=False).first_step(model)
    return state.bytes.get(id(model.weight), 0) / model.weight.numel()


def check_known(name: str) -> None:
    """Raises:
    UserError: what the optimiser keeps is not known.
    """
    if name not in TRIED and name not in STATES:
        known = [*TRIED, *STATES]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"train.optim: what {name!r} keeps in memory is not known. {hint}Known: {', '.join(known)}")


def make_optimizer(name: str, model: Any, *, on_gpu: bool) -> PlannedOptimizer:
    """The optimiser of a model without storage.

    Raises:
        UserError: what it keeps is not known.
    """
    check_known(name)
    if name in STATES:
        return PlannedOptimizer(a_value=STATES[name])
    trained = [p for p in model.parameters() if p.requires_grad]
    if name in ("adamw_torch", "adamw_torch_fused"):
        fused = name == "adamw_torch_fused"
        return PlannedOptimizer(torch.optim.AdamW(trained, fused=fused or None, foreach=None if fused else on_gpu))
    if name == "adafactor":
        from transformers.optimization import Adafactor

        options: dict[str, Any] = {"scale_parameter": False, "relative_step": False}
        return PlannedOptimizer(Adafactor(trained, lr=1e-3, **options))
    if name == "muon":
        from ..training.optimizers import MuonFactory, muon_settings

        muon, adamw = muon_settings(None, 1e-3), {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
        return PlannedOptimizer(MuonFactory()(model, decayed=set(), weight_decay=0.0, muon=muon, **adamw))
    classes: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    return PlannedOptimizer(classes[name](trained, lr=1e-3))
