"""A model without storage for a trial step: one layer of each kind stands for all that are alike."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.initialization import no_init_weights

from ...modeling import HEADS
from ...modeling.attention import AnyformerAttention
from ..errors import UserError
from ..quantization import quantized_bytes, quantized_matrices
from .setting import Setting


@dataclass
class FakeModel:
    """A model whose tensors have shapes alone.

    Attributes:
        slots: of each stack, the encoder's first: for each layer of the whole model the layer here that stands for it.
        times: id of a parameter or buffer -> how often the whole model has it; 1 for what is not here.
    """

    model: Any
    mode: FakeTensorMode
    slots: list[list[int]]
    times: dict[int, float]

    @property
    def stacks(self) -> list[Any]:
        return stacks_of(self.model)

    def repeats(self, tensor: torch.Tensor) -> float:
        return self.times.get(id(tensor), 1)


def empty_model(config: Any, head: str) -> Any:
    """The whole model on the meta device, tied as its config says."""
    with torch.device("meta"), no_init_weights():
        model: Any = HEADS[head](copy.deepcopy(config))
        model.tie_weights()
    return model


def plain(model: Any) -> Any:
    """The model inside its adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def stacks_of(model: Any) -> list[Any]:
    """The encoder and the decoder, of those that there are, in the order in which they compute."""
    body = plain(model).base_model
    return [stack for stack in (getattr(body, "encoder", None), body) if stack is not None]


def build(setting: Setting, extra: int = 0) -> FakeModel:
    """The model of a setting with as few layers as there are kinds of them.

    Args:
        extra: how often the layers of the last kind stand here once more; for what grows with the number of layers
            outside of them.

    Raises:
        UserError: an adapter that the model cannot have.
    """
    layers = setting.config.num_hidden_layers
    if _knows_layers(setting.adapter):
        model, slots = empty_model(setting.config, setting.head), []
    else:
        model, slots = copy.deepcopy(_few_layers(setting.config, setting.head, extra))
    packed = quantized_matrices(model, setting.quantization) if setting.quantization is not None else set()
    for name, module in model.named_modules():
        if f"{name}.weight" in packed:
            module.to_pack = setting.quantization
    if setting.adapter.virtual_tokens:  # a soft prompt is made for the layers that are there
        model.config.num_hidden_layers = len(stacks_of(model)[-1].layers)
    model = _adapted(model.to(getattr(torch, setting.dtype)), setting)
    slots = slots or _cut(model, extra)
    _pack(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _make_fake(model, mode)
    _choose_attention(plain(model), setting)
    times: dict[int, float] = {}
    for stack, kept in zip(stacks_of(model), slots, strict=True):
        for slot, layer in enumerate(stack.layers):
            for tensor in (*layer.parameters(), *layer.buffers()):
                times[id(tensor)] = kept.count(slot)
    if setting.adapter.kind == "prefix-tuning":  # keys and values of all layers side by side
        times |= {id(p): layers / len(stacks_of(model)[-1].layers) for p in model.prompt_encoder.parameters()}
    return FakeModel(model, mode, slots, times)


# Models of `_few_layers` by their arguments: what would make a step fit is tried on one config many times.
_KEPT: dict[tuple[str, str, int], Any] = {}


def _few_layers(config: Any, head: str, extra: int) -> Any:
    """A model with a layer of each kind, and the slots of all layers; not to be changed."""
    key = (config.to_json_string(use_diff=False), head, extra)
    if key not in _KEPT:
        model = empty_model(config, head)
        _KEPT[key] = (model, _cut(model, extra))
        for oldest in list(_KEPT)[:-4]:
            del _KEPT[oldest]
    return _KEPT[key]


def _knows_layers(adapter: Any) -> bool:
    """Whether an adapter may treat layers differently, so that it must see all of them."""
    if adapter.virtual_tokens:
        return False
    given = {name: value for name, value in adapter.arguments().items() if name not in ("r", "lora_alpha")}
    return adapter.path is not None or any(character.isdigit() for character in str(given)) or "layers" in str(given)


def _cut(model: Any, extra: int) -> list[list[int]]:
    """Leave the first layer and one of each kind; returns which stands for each layer."""
    found = []
    for stack in stacks_of(model):
        kept: list[Any] = [stack.layers[0]]
        kinds: dict[Any, int] = {}
        slots = [0]
        for layer in list(stack.layers)[1:]:
            kind = _kind(layer)
            if kind not in kinds:
                kinds[kind] = len(kept)
                kept.append(layer)
            slots.append(kinds[kind])
        rest = [layer for layer in list(stack.layers)[1:] if not any(layer is one for one in kept)]
        kept += [layer for layer in rest if kinds[_kind(layer)] == slots[-1]][:extra]
        stack.layers = nn.ModuleList(kept)
        found.append(slots)
    return found


def _kind(layer: Any) -> Any:
    parameters = ((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in layer.named_parameters())
    return (layer.layer_type, *parameters)


def _choose_attention(model: Any, setting: Setting) -> None:
    """Raises:
    UserError: the model cannot use the attention function.
    """
    name = setting.attention
    able = {"sdpa": model._supports_sdpa, "flash": model._supports_flash_attn}.get(name.partition("_")[0], True)
    if not able:
        raise UserError(
            f"model.attn_implementation: {name} has no place for something that this model adds to its scores (a soft "
            "cap, sinks, biases, latent keys): use eager, or sdpa or flex_attention where the model allows them"
        )
    model.config._attn_implementation = name if name == "eager" else "sdpa"  # fused ones keep the same
    within_kernel: list[Any] = [m for m in model.modules() if isinstance(m, AnyformerAttention)]
    for attention in within_kernel if name == "flex_attention" else ():
        attention.softcap = attention.sinks = None


def _adapted(model: Any, setting: Setting) -> Any:
    from ..adapters.attach import attach, peft_config, train_in_place
    from ..adapters.report import without_values

    if setting.adapter.kind == "none":
        return model
    with torch.device("meta"), no_init_weights():
        foreign = peft_config(setting.adapter, SimpleNamespace(task_type=setting.task_type), model)  # type: ignore[arg-type]
        if foreign is None:
            train_in_place(model, setting.adapter)
            return model
        return attach(model, without_values(foreign))


class PackedLinear(nn.Module):
    """A linear layer whose weight is in 4 or 8 bits, as bitsandbytes computes it: unpacked for each product."""

    def __init__(self, layer: nn.Linear, quantization: Any) -> None:
        super().__init__()
        self.shape, self.dtype = (layer.out_features, layer.in_features), layer.weight.dtype
        size = quantized_bytes(quantization, *self.shape)
        self.packed = nn.Buffer(torch.empty(size, dtype=torch.uint8, device="meta"))
        self.bias = layer.bias
        self.compute = None if quantization.load_in_8bit else getattr(torch, quantization.bnb_4bit_compute_dtype)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        product = _UnpackedProduct.apply(states.to(self.compute or torch.float16), self.packed, self.shape, self.bias)
        return product.to(states.dtype)


class _UnpackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, packed: torch.Tensor, shape: Any, bias: Any) -> torch.Tensor:
        ctx.packed, ctx.shape = packed, shape
        return nn.functional.linear(states, packed.new_empty(shape, dtype=states.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad @ ctx.packed.new_empty(ctx.shape, dtype=grad.dtype), None, None, None


def _pack(model: Any) -> None:
    for name, module in list(model.named_modules()):
        quantization = getattr(module, "to_pack", None)
        if quantization is not None and isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, PackedLinear(module, quantization))


def _make_fake(model: Any, mode: FakeTensorMode) -> None:
    """Move all tensors from the meta device to a processor without storage, where code takes the processor's way."""
    known: dict[int, torch.Tensor] = {}
    place = torch.device("cpu")
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in known:
                tensor = FakeTensor(mode, parameter.detach().to("meta"), place)
                known[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = known[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = FakeTensor(mode, buffer.to("meta"), place)
