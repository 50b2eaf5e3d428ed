"""What bitsandbytes does to 4-bit weights on CPUs, seen from a model that holds them; nothing of it is imported here.

On processors with AVX-512 for bf16 the first pass without gradients packs weights anew, for a product that takes half
the time. The packed scales are rounded to bf16 and transposed, and what bitsandbytes 0.50 writes of them is wrong.
"""

from typing import Any

from torch import nn

PACKED_ROWS = 32  # that are packed together


def keep_unpackable(model: nn.Module) -> None:
    """Let 4-bit matrices be whose sizes the packed form does not have: bitsandbytes would stop at an assertion."""
    module: Any
    for module in model.modules():
        if not getattr(module, "support_avx512bf16_for_cpu", False):
            continue
        state = getattr(module.weight, "quant_state", None)
        if state is not None and (state.shape[0] % PACKED_ROWS or state.shape[1] % state.blocksize):
            module.support_avx512bf16_for_cpu = False


def require_writable(model: nn.Module) -> None:
    """Raises:
    ValueError: 4-bit weights are packed for inference, and what would be written of them is wrong.
    """
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError(
                f"the 4-bit weights of this model ({name} and others) were packed for inference at its first pass, and "
                "bitsandbytes cannot write them as they were: open the model again and save it before it computes"
            )
