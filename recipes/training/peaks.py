"""How fast a device can be: known GPUs by name, others by a measured matrix product."""

import functools
import time
from dataclasses import dataclass
from typing import Any

import torch

# Part of the device's name -> dense TFLOP/s of matrix products in 16 bits (bf16; fp16 where there is none) with sums
# in fp32, and of plain fp32. The first that fits counts. From NVIDIA's data sheets and architecture white papers
# (Turing, Ampere, Ada, Hopper, Blackwell) and AMD's of the MI300; where a sheet gives "with sparsity", half of it.
KNOWN = (
    ("B200", 2250.0, 75.0),
    ("GH200", 989.4, 66.9),
    ("H200 NVL", 835.5, 60.0),
    ("H200", 989.4, 66.9),
    ("H100 PCIe", 756.4, 51.2),
    ("H100 NVL", 835.5, 60.0),
    ("H100", 989.4, 66.9),
    ("H800", 989.4, 66.9),
    ("H20", 148.0, 44.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("A30", 165.0, 10.3),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("L40S", 362.05, 91.6),
    ("L40", 181.05, 90.5),
    ("L4", 121.0, 30.3),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("RTX 6000 Ada", 364.2, 91.1),
    ("RTX A6000", 154.8, 38.7),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
    ("MI300X", 1307.4, 163.4),
)
# Sides of the measured product: as wide as the layers of a small model, short on one core.
_SIDE, _ROUNDS = {"cpu": 1024, "other": 8192}, 5


@dataclass(frozen=True)
class Peak:
    """The fastest that one device multiplies matrices.

    Attributes:
        flops: a second.
        source: where the figure is from, in words.
    """

    flops: float
    source: str


def peak_of(device: torch.device, dtype: torch.dtype, *, tf32: bool = False, stated: float | None = None) -> Peak:
    """The peak of a device in the type of training: stated, known by the device's name, or measured here.

    Args:
        tf32: products of fp32 matrices are computed in TF32, of which tensor cores do half as many as of 16 bits.
        stated: TFLOP/s of one device.
    """
    if stated is not None:
        return Peak(stated * 1e12, "logging.peak_tflops")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if (known := known_peak(name, dtype, tf32)) is not None:
            return Peak(known * 1e12, f"data sheet of {name}")
    found = measured_peak(device, dtype)
    if device.type == "cpu" and dtype != torch.float32:  # some multiply 16 bits slower, and then nobody has to
        found = max(found, measured_peak(device, torch.float32), key=lambda peak: peak.flops)
    return found


def known_peak(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Dense TFLOP/s of a GPU by its name; None where it is not in the table."""
    for part, half, single in KNOWN:
        if part.lower() in name.lower():
            return half if dtype in (torch.bfloat16, torch.float16) else half / 2 if tf32 else single
    return None


@functools.cache
def measured_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """What a product of two square matrices does on a device, the best of a few; draws no random numbers."""
    side = _SIDE["cpu" if device.type == "cpu" else "other"]
    matrix = torch.full((side, side), 0.5, device=device, dtype=dtype)
    best = min(_timed(matrix) for _ in range(_ROUNDS + 1))  # the first one is slow and never the best
    return Peak(2 * side**3 / best, f"measured product of two {side} x {side} matrices, {str(dtype).split('.')[-1]}")


def _timed(matrix: Any) -> float:
    _wait(matrix.device)
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    _wait(matrix.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
