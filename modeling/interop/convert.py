"""Import and export: `from_hf`, `to_hf`, and the check that both compute the same logits."""

import copy as copying
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ..configuration_anyformer import AnyformerConfig
from ..modeling_anyformer import AnyformerForCausalLM
from .family import ConversionError, Family
from .llama import LLAMA
from .source import FolderSource, Source, open_source

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA,)}

# Same weights, same operations: what is left is the order of additions in fp32.
FP32_TOLERANCE = 2e-4


@dataclass
class ImportReport:
    """What an import used of the source, and what it left."""

    family: str
    used: int = 0
    ignored: list[str] = field(default_factory=list)
    unused_config_fields: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LogitComparison:
    """Largest absolute difference of logits, over real tokens only.

    Attributes:
        plain: one text without padding; padded: a batch of three, left-padded.
        tokens: length of the text.
        scale: largest absolute logit of the stock class.
    """

    plain: float
    padded: float
    tokens: int
    scale: float
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """2e-4 in fp32; in a half precision a few roundings of the largest logit."""
        if self.dtype == torch.float32:
            return FP32_TOLERANCE
        return 8 * torch.finfo(self.dtype).eps * max(self.scale, 1.0)

    @property
    def equal(self) -> bool:
        return max(self.plain, self.padded) <= self.tolerance


def from_hf(source: str | Path | PreTrainedModel, *, dtype: torch.dtype | None = None, **options: Any):
    """Import a foreign model: a stock model, a folder, a GGUF file or a Hub id.

    Args:
        source: what to import. A model in memory is copied.
        dtype: of the result; default: the checkpoint's own (GGUF: fp32).
        options: `revision`, `trust_remote_code`.

    Returns:
        An `AnyformerForCausalLM` in evaluation mode, with the generation config of the source.

    Raises:
        ConversionError: an unknown family, a feature it does not cover, weights missing or left over.
    """
    return import_model(source, dtype=dtype, **options)[0]


def import_model(
    source: str | Path | PreTrainedModel,
    *,
    dtype: torch.dtype | None = None,
    config: AnyformerConfig | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[AnyformerForCausalLM, ImportReport]:
    """As `from_hf`, with the report of what was used. A folder that holds an anyformer is opened as it is.

    Args:
        config: used instead of the one that the source states, for dropout or another rotary scaling.
    """
    opened = open_source(source, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    if opened.config.model_type == AnyformerConfig.model_type:
        if not isinstance(opened, FolderSource):
            raise ConversionError("this model is an anyformer already")
        model = AnyformerForCausalLM.from_pretrained(opened.folder, config=config, dtype=dtype or "auto")
        return model, ImportReport(AnyformerConfig.model_type, used=len(model.state_dict()))
    family = family_of(opened.config)
    config = config or family.from_foreign_config(opened.config)
    state_dict, report = _our_state_dict(opened, family, config)
    dtype = dtype or next(iter(state_dict.values())).dtype
    try:
        model = AnyformerForCausalLM.from_pretrained(None, config=config, state_dict=state_dict, dtype=dtype)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    # Built from tensors, the model would otherwise claim to come from a folder named "None".
    model.name_or_path = model.config.name_or_path = ""
    if opened.generation_config is not None:
        model.generation_config = copying.deepcopy(opened.generation_config)
    return model.eval(), report


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a foreign config.

    Raises:
        ConversionError: when there is none; lists those there are.
    """
    if config.model_type not in FAMILIES:
        raise ConversionError(
            f"model_type {config.model_type!r} has no family file, and nothing is imported approximately; "
            f"known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[config.model_type]


def _our_state_dict(
    source: Source, family: Family, config: AnyformerConfig
) -> tuple[dict[str, torch.Tensor], ImportReport]:
    report = ImportReport(family.model_type, unused_config_fields=family.unused_fields(source.config))
    state_dict: dict[str, torch.Tensor] = {}
    left_over = []
    for foreign_name, tensor in source.tensors():
        name = family.our_name(foreign_name)
        if name is not None:
            state_dict[name] = tensor
            report.used += 1
        elif family.ignores(foreign_name):
            report.ignored.append(foreign_name)
        else:
            left_over.append(foreign_name)
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in AnyformerForCausalLM(config).state_dict().items()}
    left_over += [family.foreign_name(name) or name for name in sorted(set(state_dict) - set(expected))]
    if left_over:
        shown = ", ".join(left_over[:5]) + (f" and {len(left_over) - 5} more" if len(left_over) > 5 else "")
        raise ConversionError(
            f"the checkpoint has weights that a {family.model_type} with this config does not use: {shown}. "
            "Its config and its weights disagree, or it is no plain " + family.model_type
        )
    misfits = [
        f"{family.foreign_name(name)} is {list(tensor.shape)}, the config says {list(expected[name])}"
        for name, tensor in state_dict.items()
        if tensor.shape != expected[name]
    ]
    if misfits:
        raise ConversionError("config and weights disagree: " + "; ".join(misfits[:5]))
    _check_head(state_dict, family, config)
    return state_dict, report


def _check_head(state_dict: dict[str, torch.Tensor], family: Family, config: AnyformerConfig) -> None:
    """A tied head may be stored, but only as the embedding that it is."""
    head, embedding = state_dict.get("lm_head.weight"), state_dict.get("model.embed_tokens.weight")
    if not config.tie_word_embeddings or head is None or embedding is None:
        return
    if head.shape != embedding.shape or not torch.equal(head, embedding):
        raise ConversionError(
            f"config.tie_word_embeddings is true, but the model holds a {family.foreign_name('lm_head.weight')} that "
            "differs from the embedding: set tie_word_embeddings to false in its config to keep that head, or remove "
            "the tensor"
        )
    del state_dict["lm_head.weight"]


def to_hf(model: AnyformerForCausalLM, *, model_type: str | None = None, copy: bool = True) -> PreTrainedModel:
    """Export to the stock class of a family.

    Args:
        model: what to export.
        model_type: the family; default: the first that can express the config.
        copy: False lets the result share its tensors with `model`, so that nothing is held twice.

    Raises:
        ConversionError: names, for each family tried, the fields that it cannot express.
    """
    family, foreign = _foreign_config(model.config, model_type)
    stock_class = getattr(transformers, family.causal_lm)
    state_dict, ours = {}, dict(model.state_dict())
    _check_head(ours, family, model.config)
    for name, tensor in ours.items():
        foreign_name = family.foreign_name(name)
        if foreign_name is None:
            raise ConversionError(f"{family.model_type} has no place for the weight {name}")
        state_dict[foreign_name] = tensor.detach().clone() if copy else tensor.detach()
    stock, info = stock_class.from_pretrained(
        None, config=foreign, state_dict=state_dict, dtype=model.dtype, output_loading_info=True
    )
    wrong = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
    if wrong:
        raise ConversionError(f"weights of {family.causal_lm} left without a partner: {', '.join(wrong)}")
    stock.name_or_path = stock.config.name_or_path = ""
    if model.generation_config is not None:
        stock.generation_config = copying.deepcopy(model.generation_config)
    return stock.eval()


def _foreign_config(config: AnyformerConfig, model_type: str | None) -> tuple[Family, PreTrainedConfig]:
    if model_type is not None and model_type not in FAMILIES:
        raise ConversionError(f"model_type {model_type!r} has no family file; known: {', '.join(FAMILIES)}")
    problems = []
    for family in [FAMILIES[model_type]] if model_type else FAMILIES.values():
        try:
            foreign_class = getattr(transformers, family.causal_lm).config_class
            return family, family.to_foreign_config(config, foreign_class)
        except ConversionError as error:
            problems.append(str(error))
    raise ConversionError("\n".join(problems))


@torch.no_grad()
def compare_logits(model: PreTrainedModel, stock: PreTrainedModel, input_ids: torch.Tensor) -> LogitComparison:
    """Logits of both models on one text [length], and on its thirds as a left-padded batch of three."""
    length = len(input_ids)
    ours, theirs = model(input_ids[None]).logits, stock(input_ids[None]).logits
    plain = (ours - theirs).abs().max().item()
    lengths = [max(length // 3, 1), max(length // 4, 1), max(length // 6, 1)]
    batch = torch.zeros(3, lengths[0], dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, (count, start) in enumerate(zip(lengths, (0, length // 3, length // 2), strict=True)):
        batch[row, -count:] = input_ids[start : start + count]
        mask[row, -count:] = 1
    # The positions that `generate` would pass; ours finds them by itself.
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ours = model(batch, attention_mask=mask).logits
    difference = ours - stock(batch, attention_mask=mask, position_ids=positions).logits
    padded = (difference * mask[..., None]).abs().max().item()
    return LogitComparison(plain, padded, length, theirs.abs().max().item(), model.dtype)
