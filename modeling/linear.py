"""Products with the weights of linear layers, also where a processor multiplies 16-bit numbers slower than 32-bit ones.

The layers are torch's own: quantisers, adapters and tensor parallelism look for exactly these.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .inference import inference_products
from .plain import PLAIN, is_plain

# Fewer rows, as while a token is generated, are bound by reading the weights, which are half as long in 16 bits. With
# so many fp32 is faster for weights from 576 x 576 to 2,048 x 8,192.
FEW_ROWS = 256
NARROW = (torch.bfloat16, torch.float16)


def _multiplies_16_bits_slowly() -> bool:
    """Whether this is an x86 processor without matrix units (AMX); AMD's with AVX-512 for bf16 were not measured."""
    cpus = Path("/proc/cpuinfo")
    found = cpus.read_text(encoding="utf-8", errors="replace") if cpus.is_file() else ""
    if "GenuineIntel" in found:
        return "amx_bf16" not in found
    return "AuthenticAMD" in found and "avx512_bf16" not in found


SLOW_IN_16_BITS = _multiplies_16_bits_slowly()


def better_in_fp32(states: torch.Tensor, weight: Any) -> bool:
    """Whether a product of states [..., inputs] and a weight, both in 16 bits, is faster in fp32, conversions included.

    The result is at least as exact: a 16-bit product adds up in fp32 too, and both are rounded once, at the end.
    """
    if not (SLOW_IN_16_BITS and states.device.type == "cpu" and states.dtype in NARROW):
        return False
    plain = type(weight) in PLAIN  # neither quantised nor distributed
    return plain and weight.dtype == states.dtype and states.shape[:-1].numel() >= FEW_ROWS


def project(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """What a linear layer, or whatever has taken its place, makes of states: [..., inputs] -> [..., outputs].

    Weights, inputs, outputs and what is kept for backward stay in 16 bits; fp32 copies of what one layer multiplies
    exist while it does.
    """
    return project_all((layer,), states)[0]


def project_all(layers: Sequence[nn.Module], states: torch.Tensor) -> Sequence[torch.Tensor]:
    """What several layers make of the same states, each as `project`; in one product where there is a copy of all."""
    if not torch.is_grad_enabled() and (outputs := inference_products(layers, states)) is not None:
        return outputs
    return [_projected(layer, states) for layer in layers]


def _projected(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    # In this order: where it does not apply, a token costs no more than the question.
    if SLOW_IN_16_BITS and states.dtype in NARROW and _wants_fp32(layer, states):
        return _InFp32.apply(states, layer.weight, layer.bias)
    return layer(states)


def _wants_fp32(layer: nn.Module, states: torch.Tensor) -> bool:
    weight = getattr(layer, "weight", None)
    return better_in_fp32(states, weight) and is_plain(layer) and not torch.is_autocast_enabled(states.device.type)


class _InFp32(torch.autograd.Function):
    """x W^T + b of 16-bit tensors."""

    @staticmethod
    def forward(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = None if bias is None else bias.float()
        return nn.functional.linear(states.float(), weight.float(), wide).to(states.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        states, weight, _ = inputs
        by_states, by_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(states if by_weight else None, weight if by_states else None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        by_states, by_weight, by_bias = ctx.needs_input_grad
        wide, dtype = grad.float(), grad.dtype
        rows = wide.flatten(0, -2)
        return (
            (wide @ weight.float()).to(dtype) if by_states else None,
            (rows.T @ states.flatten(0, -2).float()).to(dtype) if by_weight else None,
            rows.sum(0).to(dtype) if by_bias else None,
        )
