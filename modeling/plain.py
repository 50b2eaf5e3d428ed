"""Which linear layers are torch's own and nothing else, so that their weights may be multiplied directly."""

import torch
from torch import nn

# Tensors that are nothing but their values; a trial step without storage adds its own kind.
PLAIN = {nn.Parameter, torch.Tensor}


def is_plain(layer: nn.Module) -> bool:
    """Whether a weight and a bias are all that a linear layer is: no adapter, hook, quantised or distributed weight."""
    inner = getattr(layer, "_orig_mod", layer)  # what torch.compile has wrapped
    for module in (layer, inner):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return False
    if type(inner) is not nn.Linear or "forward" in vars(inner):
        return False
    return type(layer.weight) in PLAIN
