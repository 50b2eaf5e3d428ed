"""What a family file states, and how it is read in both directions.

A family is data: which foreign config field is which of ours, what is fixed, and a table of weights. The table is
reversible, so import and export are the same table read from either side. What a family cannot express is found by
converting there and back: whatever does not return is named and refused.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ..configuration_anyformer import AnyformerConfig
from .transforms import Tensors, Transform

# Fields of every Hugging Face config that mean the same on both sides.
COMMON_FIELDS = (
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "pad_token_id",
    "tie_word_embeddings",
    "use_cache",
)
# Our fields that say nothing of what trained weights compute.
_FREE_FIELDS = {"auto_map", "initialization", "initializer_ranges", "router_bias_update_rate", "router_z_loss_coef"}
_FREE_FIELDS |= {
    "loss_chunk_size",
    "z_loss_coef",
    "output_router_logits",
    "pooler",
    "classifier_pooling",
    "classifier_bias",
    "classifier_dropout",
}

# Keys are names or tuples of names; `Any`, because a mapping is invariant in its key.
Table = Mapping[Any, str | Transform]


class ConversionError(ValueError):
    """A model or config that cannot be converted exactly; the message says which part and why.

    Args:
        fields: how many fields of a config are in the way, where that is the reason.
    """

    def __init__(self, message: str, fields: int = 1) -> None:
        super().__init__(message)
        self.fields = fields


def plain_reason(error: Exception) -> str:
    """What a validation error says, without the library's words around it."""
    lines = [line.strip().removeprefix("ValueError: ") for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Class validation error", "Validation error"))]
    return "; ".join(kept) or type(error).__name__


@dataclass(frozen=True)
class Family:
    """One family of foreign models.

    Attributes:
        model_type: the foreign `config.model_type`.
        heads: our head ("base", "causal_lm", "masked_lm", "pretraining", "seq2seq_lm", "sequence_classification",
            "token_classification", "question_answering") -> name of the stock class. The first is what a config
            without `architectures` stands for.
        config_fields: our field -> the foreign field with the same meaning. Two of ours may name one foreign
            field; export then requires them to agree.
        fixed: our field -> the only value that the foreign class has.
        weights: our name, or the names of several -> foreign name, or a `Transform`; `{layer}` is the layer number.
        examples: keyword arguments of tiny foreign configs that show what is covered: the tests and the table of
            families compare each with the stock class.
        foreign_fixed: foreign field -> the only value that we compute.
        read: our fields that are computed from a foreign config; write: foreign fields that are computed from ours.
        free_fields: foreign fields that change nothing that is computed, or only the training (as layer drop).
        weights_when: (our fields with their values, table) for weights that depend on the config.
        tied: foreign name -> foreign name of the weight that it repeats.
        pooler_heads: heads whose stock class has a pooler.
        prefix: of the base model's weights in the stock class with a head; head_prefixes: the same for heads that
            call it otherwise.
        head_weights: our head -> entries that replace those of `weights`.
        first_position: the position that the stock class gives the first token, from its config.
        partial_rotary: the stock class reads `partial_rotary_factor` of `rope_parameters`.
        nested_rope: the stock class takes `rope_parameters` by layer type.
        ignored_weights: patterns of foreign tensors that carry no weight, as old rotary buffers.
        recomputed: patterns of foreign tensors that the stock class computes by itself when it is built.
    """

    model_type: str
    heads: Mapping[str, str]
    config_fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    weights: Table
    examples: Sequence[Mapping[str, Any]] = ({},)
    foreign_fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Any], dict[str, Any]] = lambda foreign: {}
    write: Callable[[AnyformerConfig], dict[str, Any]] = lambda config: {}
    free_fields: Iterable[str] = ()
    weights_when: Sequence[tuple[Mapping[str, Any], Table]] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    pooler_heads: Iterable[str] = ()
    prefix: str = "model."
    head_prefixes: Mapping[str, str] = field(default_factory=dict)
    head_weights: Mapping[str, Table] = field(default_factory=dict)
    first_position: Callable[[Any], int] = lambda foreign: 0
    partial_rotary: bool = False
    nested_rope: bool = False
    ignored_weights: Iterable[str] = ()
    recomputed: Iterable[str] = ()

    @property
    def library_layout(self) -> bool:
        """Checkpoints are stored otherwise than the stock class holds them: the library turns one into the other."""
        return get_checkpoint_conversion_mapping(self.model_type) is not None

    @property
    def default_head(self) -> str:
        return next(iter(self.heads))

    def head_of(self, stock_class: str | None) -> str:
        """Our head for the name of a stock class; None: the family's first.

        Raises:
            ConversionError: a class that the family does not cover.
        """
        if stock_class is None:
            return self.default_head
        for head, name in self.heads.items():
            if name == stock_class:
                return head
        raise ConversionError(
            f"{self.model_type} is imported with these classes: {', '.join(self.heads.values())}; not {stock_class}"
        )

    def from_foreign_config(self, foreign: PreTrainedConfig, head: str | None = None) -> AnyformerConfig:
        """Our config for a foreign one.

        Raises:
            ConversionError: where the foreign config says something that ours cannot.
        """
        problems = [
            f"{name}={getattr(foreign, name)!r}: only {value!r} can be imported"
            for name, value in self.foreign_fixed.items()
            if getattr(foreign, name, value) != value
        ]
        if getattr(foreign, "quantization_config", None) is not None:
            problems.append("quantization_config is set: dequantise the checkpoint first")
        if problems:
            raise ConversionError(f"{self.model_type} config cannot be imported exactly: " + "; ".join(problems))
        config = self._ours(foreign, head or self.default_head)
        try:
            again = self._theirs(config, type(foreign))
        except (StrictDataclassError, ValueError, TypeError) as error:
            raise ConversionError(
                f"{self.model_type} config cannot be imported exactly: {plain_reason(error)}"
            ) from error
        lost = [
            f"{name}={getattr(foreign, name)!r} (only {getattr(again, name)!r} can be imported)"
            for name in self.own_fields(type(foreign))
            if name not in self.free_fields
            and _plain(getattr(foreign, name)) != _plain(getattr(again, name))
            and not (name == "pad_token_id" and foreign.pad_token_id == -1)
        ]
        if lost:
            raise ConversionError(f"{self.model_type} config cannot be imported exactly: " + "; ".join(lost))
        return config

    def _ours(self, foreign: PreTrainedConfig, head: str) -> AnyformerConfig:
        values = {name: getattr(foreign, name) for name in COMMON_FIELDS if hasattr(foreign, name)}
        if values.get("pad_token_id") == -1:  # "no padding token" of the first Llama checkpoints
            values["pad_token_id"] = None
        values |= dict(self.fixed) | {"pooler": head in self.pooler_heads}
        if values.get("architecture", "decoder") == "decoder":  # stock sequence classifiers have no bias
            values["classifier_bias"] = head == "token_classification"
        try:
            self._check_rope(getattr(foreign, "rope_parameters", None) or {})
            values |= {ours: getattr(foreign, theirs) for ours, theirs in self.config_fields.items()}
            return AnyformerConfig(**copy.deepcopy(values | self.read(foreign)))
        except (StrictDataclassError, TypeError, ValueError, AttributeError) as error:
            raise ConversionError(f"{self.model_type} config cannot be imported: {plain_reason(error)}") from error

    def _check_rope(self, rope: Mapping[str, Any]) -> None:
        """Raises ValueError for rope parameters that the stock class would not read."""
        nested = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
        if nested and not self.nested_rope:
            raise ValueError(f"its class takes one set of rope_parameters, not one for each of {sorted(nested)}")
        shares = [part.get("partial_rotary_factor") for part in (nested.values() or [rope])]
        if not self.partial_rotary and any(share not in (None, 1, 1.0) for share in shares):
            raise ValueError(f"its class does not read partial_rotary_factor={shares[0]!r} of rope_parameters")

    def to_foreign_config(
        self, config: AnyformerConfig, foreign_class: type[PreTrainedConfig], head: str | None = None
    ) -> PreTrainedConfig:
        """The foreign config for ours.

        Raises:
            ConversionError: names every field that the foreign class cannot express.
        """
        problems = [
            f"{name}={getattr(config, name)!r} (it knows only {value!r})"
            for name, value in self.fixed.items()
            if getattr(config, name) != value
        ]
        seen: dict[str, Any] = dict(self.foreign_fixed)
        for ours, theirs in self.config_fields.items():
            value = getattr(config, ours)
            if theirs in seen and seen[theirs] != value:
                problems.append(f"{ours}={value!r} (its {theirs} is {seen[theirs]!r})")
            seen[theirs] = value
        if problems:
            raise ConversionError(f"{self.model_type} cannot express " + ", ".join(problems), len(problems))
        try:
            foreign = self._theirs(config, foreign_class)
            again = self._ours(foreign, head or self.default_head)
        except (StrictDataclassError, ValueError, TypeError, ZeroDivisionError) as error:
            raise ConversionError(f"{self.model_type} cannot express this config: {plain_reason(error)}") from error
        lost = [
            f"{f.name}={getattr(config, f.name)!r} (it would be {getattr(again, f.name)!r})"
            for f in _own_fields(AnyformerConfig)
            if f.name not in _FREE_FIELDS and _plain(getattr(config, f.name)) != _plain(getattr(again, f.name))
        ]
        if lost:
            raise ConversionError(f"{self.model_type} cannot express " + ", ".join(lost), len(lost))
        foreign.architectures = [self.heads[head or self.default_head]]
        return foreign

    def _theirs(self, config: AnyformerConfig, foreign_class: type[PreTrainedConfig]) -> PreTrainedConfig:
        values: dict[str, Any] = dict(self.foreign_fixed)
        values |= {theirs: getattr(config, ours) for ours, theirs in self.config_fields.items()}
        values |= {name: getattr(config, name) for name in COMMON_FIELDS}
        return foreign_class(**copy.deepcopy(values | self.write(config)))

    @staticmethod
    def own_fields(foreign_class: type[PreTrainedConfig]) -> list[str]:
        """Fields of a foreign config that its class adds to the common ones."""
        return [f.name for f in _own_fields(foreign_class)]

    def unused_fields(self, foreign: PreTrainedConfig) -> list[str]:
        """Fields of a foreign config that neither its own class nor this family reads."""
        known = {f.name for f in fields(foreign)} | {"output_attentions", "num_labels", "rope_theta", "head_dim"}
        known |= {"partial_rotary_factor", *type(foreign)().to_dict()}  # some are computed by the class itself
        known |= {*COMMON_FIELDS, *type(foreign).attribute_map.values(), *self.fields_read(foreign)}
        return sorted(k for k in foreign.to_dict() if k not in known and not k.startswith("_"))

    def fields_read(self, foreign: PreTrainedConfig) -> set[str]:
        """The foreign fields that an import looks at."""
        read = set(self.foreign_fixed)

        class Recorder:
            def __getattr__(self, name: str) -> Any:
                read.add(name)
                return getattr(foreign, name)

        self._ours(Recorder(), self.default_head)  # type: ignore[arg-type]
        return read

    def rules(self, config: AnyformerConfig, head: str | None = None) -> "Rules":
        """The table of weights for a config and a head."""
        table = dict(self.weights)
        for condition, more in self.weights_when:
            if all(getattr(config, name) == value for name, value in condition.items()):
                table |= dict(more)
        return Rules(table | dict(self.head_weights.get(head or "", {})), config)

    def ignores(self, foreign_name: str) -> bool:
        return any(_pattern(p).fullmatch(foreign_name) for p in self.ignored_weights)

    def recomputes(self, foreign_name: str) -> bool:
        return any(_pattern(p).fullmatch(foreign_name) for p in self.recomputed)


def _own_fields(config_class: type[PreTrainedConfig]) -> list[Any]:
    common = {f.name for f in fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    return [f for f in fields(config_class) if f.name not in common or f.name in ("bos_token_id", "eos_token_id")]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return value


@dataclass
class _Rule:
    ours: list[re.Pattern[str]]
    theirs: list[re.Pattern[str]]
    our_names: tuple[str, ...]
    transform: Transform


class Rules:
    """A table of weights, read from either side one tensor at a time.

    Args:
        table: as `Family.weights`.
        config: sizes that a transform needs.
    """

    def __init__(self, table: Table, config: AnyformerConfig) -> None:
        self.config = config
        self._rules = []
        for ours, theirs in table.items():
            names = (ours,) if isinstance(ours, str) else tuple(ours)
            transform = Transform(theirs) if isinstance(theirs, str) else theirs
            patterns = [_pattern(n) for n in names], [_pattern(n) for n in transform.names]
            self._rules.append(_Rule(*patterns, names, transform))

    def to_ours(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Our (name, tensor), as soon as all foreign tensors that a rule needs have come.

        A foreign name that no rule has, or whose rule lacks other tensors in the end, comes back with None.
        """
        waiting: dict[tuple[int, str | None], dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            found = self._find(name, "theirs")
            if found is None:
                yield name, None
                continue
            index, layer = found
            rule, slot = self._rules[index], waiting.setdefault((index, layer), {})
            slot[name] = tensor
            wanted = [_fill(n, layer) for n in rule.transform.names]
            if len(slot) == len(wanted) and set(slot) == set(wanted):
                del waiting[index, layer]
                result = rule.transform.to_ours([slot[n] for n in wanted], self.config)
                yield from zip((_fill(n, layer) for n in rule.our_names), result, strict=True)
        for slot in waiting.values():
            yield from ((name, None) for name in slot)

    def to_theirs(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Foreign (name, tensor) for all of ours; one of ours that no rule has comes back with None."""
        done: set[str] = set()
        for name in tensors:
            found = self._find(name, "ours")
            if found is None:
                yield name, None
                continue
            index, layer = found
            rule = self._rules[index]
            names = [_fill(n, layer) for n in rule.our_names]
            if name in done:
                continue
            missing = [n for n in names if n not in tensors]
            if missing:
                yield name, None
                continue
            done.update(names)
            result: Tensors = rule.transform.to_theirs([tensors[n] for n in names], self.config)
            yield from zip([_fill(n, layer) for n in rule.transform.names], result, strict=True)

    def reads(self, foreign_name: str) -> bool:
        """Whether the table has that foreign weight."""
        return self._find(foreign_name, "theirs") is not None

    def foreign_name(self, our_name: str) -> str:
        """The foreign weight that holds ours, for messages; our name where there is none."""
        found = self._find(our_name, "ours")
        return our_name if found is None else _fill(self._rules[found[0]].transform.names[0], found[1])

    def _find(self, name: str, side: str) -> tuple[int, str | None] | None:
        for index, rule in enumerate(self._rules):
            for pattern in getattr(rule, side):
                if match := pattern.fullmatch(name):
                    return index, match.groupdict().get("layer")
        return None


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{layer\}", r"(?P<layer>\d+)"))


def _fill(name: str, layer: str | None) -> str:
    return name if layer is None else name.replace("{layer}", layer)


def layers(ours: Iterable[str], theirs: str | None = None) -> dict[Any, str | Transform]:
    """Table entries of weights that only change their prefix: `model.layers.{layer}.X` <-> `theirs.X`."""
    prefix = "model.layers.{layer}."
    return {prefix + name: (theirs or prefix) + name for name in ours}
