"""Import and export: `from_hf`, `to_hf`, and the check that both compute the same outputs."""

import copy as copying
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ..configuration_anyformer import AnyformerConfig
from ..heads import HEADS
from ..pretrained import AnyformerPreTrainedModel
from .families import FAMILIES
from .family import ConversionError, Family, Rules
from .source import FolderSource, Source, open_source

# Weights that belong to one head of an encoder, not to the others.
_SPARE = ("nsp_head.", "model.pooler.", "pooler.", "lm_head.", "lm_head_transform.")
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
    """Largest absolute difference of logits (of hidden states where there is no head), over real tokens only.

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
        """A few roundings of the largest logit; in fp32, where sums of thousands of terms are taken in another order,
        64 of them, and at least 2e-4 (3e-4 at logits of 40)."""
        rounding = torch.finfo(self.dtype).eps * max(self.scale, 1.0)
        if self.dtype == torch.float32:
            return max(FP32_TOLERANCE, 64 * rounding)
        return 8 * rounding

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
        The anyformer class of the same head (`AnyformerForCausalLM` for a `LlamaForCausalLM`) in evaluation mode,
        with the generation config of the source.

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
) -> tuple[Any, ImportReport]:
    """As `from_hf`, with the report of what was used. A folder that holds an anyformer is opened as it is.

    Args:
        config: used instead of the one that the source states, for dropout or another rotary scaling.
    """
    opened = open_source(source, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    if opened.config.model_type == AnyformerConfig.model_type:
        if not isinstance(opened, FolderSource):
            raise ConversionError("this model is an anyformer already")
        names = {cls.__name__: cls for cls in HEADS.values()}
        cls = names.get((opened.config.architectures or [""])[0], HEADS["causal_lm"])
        model = cls.from_pretrained(opened.folder, config=config, dtype=dtype or "auto")
        return model, ImportReport(AnyformerConfig.model_type, used=len(model.state_dict()))
    family = family_of(opened.config)
    head = family.head_of(opened.stock_class)
    config = config or family.from_foreign_config(opened.config, head)
    state_dict, report = _our_state_dict(opened, family, head, config)
    dtype = dtype or next(iter(state_dict.values())).dtype
    config.architectures = [HEADS[head].__name__]  # so that an absent head is an error
    try:
        model = HEADS[head].from_pretrained(None, config=config, state_dict=state_dict, dtype=dtype)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    # Built from tensors, the model would otherwise claim to come from a folder named "None".
    model.name_or_path = model.config.name_or_path = ""
    if opened.generation_config is not None and model.can_generate():
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
    source: Source, family: Family, head: str, config: AnyformerConfig
) -> tuple[dict[str, torch.Tensor], ImportReport]:
    report = ImportReport(family.model_type, unused_config_fields=family.unused_fields(source.config))
    rules = family.rules(config, head)
    base = head == "base"
    state_dict: dict[str, torch.Tensor] = {}
    left_over: list[str] = []
    for name, tensor in rules.to_ours(_foreign_tensors(source, family, rules, head, report)):
        if tensor is None:
            left_over.append(name)
        else:
            state_dict[name.removeprefix("model.") if base else name] = tensor
    with torch.device("meta"):
        try:
            model = HEADS[head](config)
        except ValueError as error:  # a head that the shape does not have
            raise ConversionError(str(error)) from error
        expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    prefix = "model." if base else ""
    # Published checkpoints hold parts of other heads than the class they name; the stock class leaves them out too.
    for name in [n for n in state_dict if n not in expected and n.startswith(_SPARE)]:
        del state_dict[name]
        report.ignored.append(rules.foreign_name(prefix + name))
    left_over += [rules.foreign_name(prefix + name) for name in sorted(set(state_dict) - set(expected))]
    if left_over:
        shown = ", ".join(left_over[:5]) + (f" and {len(left_over) - 5} more" if len(left_over) > 5 else "")
        raise ConversionError(
            f"the checkpoint has weights that a {family.model_type} with this config does not use: {shown}. "
            "Its config and its weights disagree, or it is no plain " + family.model_type
        )
    misfits = [
        f"{rules.foreign_name(prefix + name)} is {list(tensor.shape)}, the config says {list(expected[name])}"
        for name, tensor in state_dict.items()
        if tensor.shape != expected[name]
    ]
    if misfits:
        raise ConversionError("config and weights disagree: " + "; ".join(misfits[:5]))
    _drop_tied(state_dict, model, rules.foreign_name)
    return state_dict, report


def _foreign_tensors(
    source: Source, family: Family, rules: Rules, head: str, report: ImportReport
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by the names of the stock class with a head; repeated ones once."""
    repeated: dict[str, torch.Tensor] = {}
    canonical: dict[str, torch.Tensor] = {}
    own = family.head_prefixes.get(head)
    for name, tensor in source.tensors(library_layout=family.library_layout):
        if head == "base":
            name = family.prefix + name
        elif own is not None and name.startswith(own):
            name = family.prefix + name.removeprefix(own)
        elif not rules.reads(name) and (rules.reads(family.prefix + name) or family.ignores(family.prefix + name)):
            name = family.prefix + name  # saved from the base class, though the config names one with a head
        report.used += 1
        if name in family.tied:
            repeated[name] = tensor
            continue
        if family.ignores(name):
            report.used -= 1
            report.ignored.append(name)
            continue
        if name in family.tied.values():
            canonical[name] = tensor
        yield name, tensor
    for name, tensor in repeated.items():
        target = family.tied[name]
        if target not in canonical:
            canonical[target] = tensor
            yield target, tensor
        elif not torch.equal(canonical[target], tensor):
            raise ConversionError(f"{name} should repeat {target} but differs from it")


def _drop_tied(state_dict: dict[str, torch.Tensor], model: AnyformerPreTrainedModel, foreign_name: Any) -> None:
    """A tied weight may be stored, but only as the one that it repeats."""
    for target, source in model.get_expanded_tied_weights_keys().items():
        repeated, original = state_dict.get(target), state_dict.get(source)
        if repeated is None or original is None:
            continue
        if repeated.shape != original.shape or not torch.equal(repeated, original):
            raise ConversionError(
                f"config.tie_word_embeddings is true, but the model holds a {foreign_name(target)} that "
                f"differs from {foreign_name(source)}: set tie_word_embeddings to false in its config to keep it, or "
                "remove the tensor"
            )
        del state_dict[target]


def to_hf(model: AnyformerPreTrainedModel, *, model_type: str | None = None, copy: bool = True) -> PreTrainedModel:
    """Export to the stock class of a family.

    Args:
        model: what to export.
        model_type: the family; default: the first that can express the config.
        copy: False lets the result share its tensors with `model`, so that nothing is held twice.

    Raises:
        ConversionError: names, for each family tried, the fields that it cannot express.
    """
    head = next(name for name, cls in HEADS.items() if type(model) is cls)
    family, foreign = _foreign_config(model.config, model_type, head)
    stock_class = getattr(transformers, family.heads[head])
    ours = dict(model.state_dict())
    rules = family.rules(model.config, head)
    _drop_tied(ours, model, rules.foreign_name)
    base = head == "base"
    state_dict = {}
    for name, tensor in rules.to_theirs({("model." + n if base else n): t for n, t in ours.items()}):
        if tensor is None:
            raise ConversionError(f"{family.model_type} has no place for the weight {name}")
        state_dict[name] = tensor.detach().clone() if copy else tensor.detach()
    state_dict |= {alias: state_dict[name] for alias, name in family.tied.items() if name in state_dict}
    if head in family.head_prefixes:
        own = family.head_prefixes[head]
        state_dict = {
            own + n.removeprefix(family.prefix) if n.startswith(family.prefix) else n: t for n, t in state_dict.items()
        }
    if base:
        state_dict = {name.removeprefix(family.prefix): tensor for name, tensor in state_dict.items()}
    stock, info = stock_class.from_pretrained(
        None, config=foreign, state_dict=state_dict, dtype=model.dtype, output_loading_info=True
    )
    wrong = [name for name in info["missing_keys"] if not family.recomputes(family.prefix * base + name)]
    wrong = sorted(wrong) + sorted(info["unexpected_keys"])
    if wrong:
        raise ConversionError(f"weights of {stock_class.__name__} left without a partner: {', '.join(wrong)}")
    stock.name_or_path = stock.config.name_or_path = ""
    if getattr(model, "generation_config", None) is not None and stock.can_generate():
        stock.generation_config = copying.deepcopy(model.generation_config)
    return stock.eval()


def _foreign_config(config: AnyformerConfig, model_type: str | None, head: str) -> tuple[Family, PreTrainedConfig]:
    if model_type is not None and model_type not in FAMILIES:
        raise ConversionError(f"model_type {model_type!r} has no family file; known: {', '.join(FAMILIES)}")
    problems: list[ConversionError] = []
    for family in [FAMILIES[model_type]] if model_type else FAMILIES.values():
        if head not in family.heads:
            if model_type:
                raise ConversionError(f"{model_type} has no stock class for the head {head!r}")
            continue
        try:
            foreign_class = getattr(transformers, family.heads[head]).config_class
            return family, family.to_foreign_config(config, foreign_class, head)
        except ConversionError as error:
            problems.append(error)
    if model_type:
        raise problems[0]
    nearest = sorted(problems, key=lambda error: error.fields)[:3]
    raise ConversionError("no family can express this config. The nearest:\n" + "\n".join(map(str, nearest)))


@torch.no_grad()
def compare_logits(model: PreTrainedModel, stock: PreTrainedModel, input_ids: torch.Tensor) -> LogitComparison:
    """Outputs of both models on one text [length], and on its thirds as a left-padded batch of three."""
    length = len(input_ids)
    everything = torch.ones(1, length, dtype=torch.long)
    ours, theirs = (outputs_of(m, input_ids[None], everything) for m in (model, stock))
    plain = (ours - theirs).abs().max().item()
    lengths = [max(length // 3, 1), max(length // 4, 1), max(length // 6, 1)]
    batch = torch.zeros(3, lengths[0], dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, (count, start) in enumerate(zip(lengths, (0, length // 3, length // 2), strict=True)):
        batch[row, -count:] = input_ids[start : start + count]
        mask[row, -count:] = 1
    padded_ours = outputs_of(model, batch, mask)
    body: Any = model.base_model
    if padded_ours.dim() == 2 or body.positions.turning:
        # Stock classifiers of texts that read the first token read padding there, and rotary frequencies of stock
        # classes turn for a whole batch by its longest row: theirs get each row by itself.
        rows = zip(padded_ours, batch, mask.bool(), strict=True)
        padded = torch.tensor([row_difference(stock, *row) for row in rows]).max().item()
    else:
        padded = ((padded_ours - outputs_of(stock, batch, mask)) * mask[..., None]).abs().max().item()
    return LogitComparison(plain, padded, length, theirs.abs().max().item(), model.dtype)


def row_difference(stock: PreTrainedModel, ours: torch.Tensor, row: torch.Tensor, real: torch.Tensor) -> float:
    """The largest difference of the outputs of a padded row from the stock class's on the row without padding."""
    theirs = outputs_of(stock, row[real][None], torch.ones_like(row[real])[None])[0]
    return ((ours[real] if ours.dim() == 2 else ours) - theirs).abs().max().item()


@torch.no_grad()
def outputs_of(model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """Logits [batch, length, vocab_size], or hidden states of a model without a language-model head.

    Args:
        mask: [batch, length], 1 for real tokens. A stock class is given the positions that follow from it, where it
            takes positions; ours finds them by itself.
        shift: added to the positions, of both; stock encoder-decoders take none.

    An encoder-decoder reads `input_ids` on both sides.
    """
    arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask}
    positions = (mask.cumsum(-1) - 1).clamp(min=0) + shift
    if model.config.model_type in FAMILIES:
        positions = positions + FAMILIES[model.config.model_type].first_position(model.config)
    known = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder:
        arguments |= {"decoder_input_ids": input_ids, "decoder_attention_mask": mask}
    elif "position_ids" in known and (shift or not isinstance(model, AnyformerPreTrainedModel)):
        arguments["position_ids"] = positions
    output = model(**arguments)
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return torch.stack((output.start_logits, output.end_logits), dim=-1)
