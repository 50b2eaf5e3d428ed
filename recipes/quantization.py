"""Bases in 4 or 8 bits, with bitsandbytes: for training an adapter beside them in less memory (QLoRA).

Every linear module is quantised except the head and the gates that route tokens. Embeddings and norms are no linear
modules, and neither are stacked experts, so they stay as they are (Dettmers et al. 2023, arXiv:2305.14314; Dettmers et
al. 2022, arXiv:2208.07339).
"""

import copy
import importlib.util
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from .schema import ModelSection, Quantization

# Values that share one scale, and scales that share one of their own (arXiv:2305.14314, sec. 3).
BLOCK, NESTED_BLOCK = 64, 256


def require_available(quantization: "Quantization | None") -> None:
    """Make sure that this machine can train on quantised weights, by doing it once.

    Raises:
        UserError: bitsandbytes is missing, or cannot work here.
    """
    if quantization is None:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "model.quantization: the package bitsandbytes is not installed: pip install bitsandbytes, or the extra "
            "`quantization` of this project; or leave model.quantization out"
        )
    import torch

    try:
        from transformers.integrations import validate_bnb_backend_availability

        validate_bnb_backend_availability(raise_exception=True)
        module = _linear(quantization, 64, 8).to("cuda" if torch.cuda.is_available() else "cpu")
        x = torch.ones(2, 64, device=module.weight.device, requires_grad=True)
        module(x).float().sum().backward()
        works = x.grad is not None and bool(x.grad.isfinite().all())
    except (RuntimeError, ImportError, NotImplementedError, ValueError, OSError) as error:
        raise UserError(
            f"model.quantization: bitsandbytes cannot train in {quantization.bits} bits on this machine: {error}. "
            "Leave model.quantization out, or use a machine with a GPU"
        ) from error
    if not works:
        raise UserError(
            f"model.quantization: no gradient passes through {quantization.bits}-bit weights on this machine: leave "
            "model.quantization out"
        )


def _linear(quantization: "Quantization", inputs: int, outputs: int) -> Any:
    """One quantised module, as the model's will be."""
    import bitsandbytes as bnb
    import torch

    options = config_of(quantization, [])
    if quantization.load_in_8bit:
        return bnb.nn.Linear8bitLt(inputs, outputs, has_fp16_weights=False, threshold=options.llm_int8_threshold)
    module = bnb.nn.Linear4bit(
        inputs,
        outputs,
        compute_dtype=options.bnb_4bit_compute_dtype,
        compress_statistics=options.bnb_4bit_use_double_quant,
        quant_type=options.bnb_4bit_quant_type,
        quant_storage=torch.uint8,
    )
    module.support_avx512bf16_for_cpu = False
    return module


def config_of(quantization: "Quantization", kept: list[str]) -> Any:
    """The library's config.

    Args:
        kept: names of the linear modules that are not quantised.
    """
    from transformers import BitsAndBytesConfig

    options = quantization.arguments() | {"llm_int8_skip_modules": kept}
    if "llm_int8_threshold" in options:
        options["llm_int8_threshold"] = float(options["llm_int8_threshold"])  # the class refuses `6`
    return BitsAndBytesConfig(**options)


def kept_modules(model: Any, quantization: "Quantization") -> list[str]:
    """Names of the linear modules that stay as they are: the head, gates of routers, and those that the recipe names.

    Raises:
        UserError: the recipe names a module that the model does not have.
    """
    from .adapters.targets import linear_modules

    parts = linear_modules(model)
    names = list(parts)
    for given in quantization.llm_int8_skip_modules or ():
        if not any(given in name.split(".") or given == name for name in names):
            last = sorted({name.rpartition(".")[2] for name in names})
            raise UserError(
                f"model.quantization.llm_int8_skip_modules names {given!r}; the model's linear modules are "
                f"{', '.join(last)}"
            )
    kept = {name for name, part in parts.items() if part in ("head", "router")}
    return sorted({*kept, *(quantization.llm_int8_skip_modules or ())})


def quantize(model: Any, quantization: "Quantization") -> Any:
    """The model with quantised weights, on the GPU where there is one.

    The library quantises one tensor after the other, so beside the given model only the quantised one is held.

    Raises:
        UserError: the weights cannot be quantised.
    """
    try:
        quantized = type(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=model.state_dict(),
            dtype=model.dtype,
            attn_implementation=model.config._attn_implementation,
            quantization_config=config_of(quantization, kept_modules(model, quantization)),
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"model.quantization: {error}") from error
    if not any(type(module).__module__.startswith("bitsandbytes") for module in quantized.modules()):
        raise UserError("model.quantization: no module of this model was quantised, so it would train as it is")
    quantized.name_or_path = quantized.config.name_or_path = model.name_or_path
    if model.can_generate():
        quantized.generation_config = copy.deepcopy(model.generation_config)
    for module in quantized.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # With this on, the first pass without gradients packs the weights for inference: every later gradient
            # would be missing and every later value wrong.
            module.support_avx512bf16_for_cpu = False
    return quantized.train(model.training)


@dataclass(frozen=True)
class WeightsPlan:
    """What the weights of a base take.

    Attributes:
        bytes: of all weights.
        bits: of the quantised ones; None where none are.
        quantized: part of the model -> number of parameters that are quantised; kept: the same of those that are not.
        dtype: of what is kept.
    """

    bytes: int
    bits: int | None
    quantized: dict[str, int]
    kept: dict[str, int]
    dtype: str

    def describe(self) -> list[tuple[str, str]]:
        """(name, value) lines for the plan; none where nothing is quantised."""
        from .planning import count

        if self.bits is None:
            return []
        quantized, kept = (
            ", ".join(f"{part} {count(number)}" for part, number in parts.items())
            for parts in (self.quantized, self.kept)
        )
        return [("quantised", f"in {self.bits} bits: {quantized}; left in {self.dtype}: {kept}")]


def weights_plan(config: Any, head: str, section: "ModelSection") -> WeightsPlan:
    """What the weights will take, counted on a model without storage.

    Args:
        head: key of `modeling.HEADS`.
    """
    import torch
    from transformers.initialization import no_init_weights

    from ..modeling import HEADS
    from ..modeling.counting import part_of
    from .planning import BYTES

    with torch.device("meta"), no_init_weights():
        model: Any = HEADS[head](copy.deepcopy(config))
    quantization, size, total = section.quantization, BYTES.get(section.dtype, 4), 0
    matrices = quantized_matrices(model, quantization) if quantization is not None else set()
    tied = set(model.get_expanded_tied_weights_keys())
    packed: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if name in tied:
            continue
        if quantization is not None and name in matrices:
            packed[part_of(name)] += parameter.numel()
            total += quantized_bytes(quantization, *parameter.shape)
        else:
            kept[part_of(name)] += parameter.numel()
            total += parameter.numel() * size
    bits = quantization.bits if quantization is not None else None
    return WeightsPlan(total, bits, dict(packed), dict(kept), section.dtype)


def quantized_matrices(model: Any, quantization: "Quantization") -> set[str]:
    """Names of the parameters that are quantised."""
    from .adapters.targets import linear_modules

    kept = kept_modules(model, quantization)
    names = linear_modules(model)
    return {f"{name}.weight" for name in names if not any(name == k or name.endswith(f".{k}") for k in kept)}


def quantized_bytes(quantization: "Quantization", outputs: int, inputs: int) -> int:
    """Bytes of one quantised matrix with its scales and tables.

    8 bits: a byte a value and one scale in fp32 a row (LLM.int8()). 4 bits: half a byte a value and one scale in fp32
    for each block of 64 values, so 4.5 bits a value; with double quantisation the scales take a byte each and one
    scale in fp32 for 256 of them, so 4.127 bits a value. Tables: 16 values of 4 bits, 256 of nested scales.
    """
    values = outputs * inputs
    if quantization.load_in_8bit:
        return values + 4 * outputs
    scales = -(-values // BLOCK)
    if quantization.bnb_4bit_use_double_quant:
        return -(-values // 2) + scales + 4 * -(-scales // NESTED_BLOCK) + 4 * (16 + 256 + 1)
    return -(-values // 2) + 4 * scales + 4 * 16
