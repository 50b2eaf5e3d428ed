"""What a family file states, and how it is read in both directions.

A family is data: which foreign config field is which of ours, what is fixed, and a table of weight names. Both
tables are one-to-one, so import and export are the same table read from either side.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig

from ..configuration_anyformer import AnyformerConfig

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


class ConversionError(ValueError):
    """A model or config that cannot be converted exactly; the message says which part and why."""


@dataclass(frozen=True)
class Family:
    """One family of foreign models.

    Attributes:
        model_type: the foreign `config.model_type`.
        causal_lm: name of the stock class in transformers.
        config_fields: our field -> the foreign field with the same meaning. Two of ours may name one foreign
            field; export then requires them to agree.
        fixed: our field -> the only value that the foreign class has.
        foreign_fixed: foreign field -> the only value that we compute.
        weights: our name -> foreign name, with `{layer}` for the layer number.
        ignored_weights: patterns (with `{layer}`) of foreign tensors that carry no weight, as old rotary buffers.
    """

    model_type: str
    causal_lm: str
    config_fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    weights: Mapping[str, str]
    foreign_fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored_weights: Iterable[str] = ()

    def from_foreign_config(self, foreign: PreTrainedConfig) -> AnyformerConfig:
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
        values = {name: getattr(foreign, name) for name in COMMON_FIELDS if hasattr(foreign, name)}
        values |= {ours: getattr(foreign, theirs) for ours, theirs in self.config_fields.items()}
        if values.get("pad_token_id") == -1:  # "no padding token" of the first Llama checkpoints
            values["pad_token_id"] = None
        try:
            return AnyformerConfig(**(values | dict(self.fixed)))
        except (StrictDataclassError, TypeError) as error:
            raise ConversionError(f"{self.model_type} config cannot be imported: {error}") from error

    def to_foreign_config(self, config: AnyformerConfig, foreign_class: type[PreTrainedConfig]) -> PreTrainedConfig:
        """The foreign config for ours.

        Raises:
            ConversionError: names every field that the foreign class cannot express.
        """
        problems = [
            f"{name}={getattr(config, name)!r} (it knows only {value!r})"
            for name, value in self.fixed.items()
            if getattr(config, name) != value
        ]
        values: dict[str, Any] = dict(self.foreign_fixed)
        for ours, theirs in self.config_fields.items():
            value = getattr(config, ours)
            if theirs in values and values[theirs] != value:
                problems.append(f"{ours}={value!r} (its {theirs} is {values[theirs]!r})")
            values[theirs] = value
        if problems:
            raise ConversionError(f"{self.model_type} cannot express " + ", ".join(problems))
        values |= {name: getattr(config, name) for name in COMMON_FIELDS}
        foreign = foreign_class(**copy.deepcopy(values))
        foreign.architectures = [self.causal_lm]
        return foreign

    def unused_fields(self, foreign: PreTrainedConfig) -> list[str]:
        """Fields of a foreign config that neither its own class nor this family reads."""
        known = {f.name for f in fields(foreign)} | {
            "model_type",
            "transformers_version",
            "output_attentions",
        }
        return sorted(k for k in foreign.to_dict() if k not in known and not k.startswith("_"))

    @cached_property
    def _to_ours(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_pattern(theirs), ours) for ours, theirs in self.weights.items()]

    @cached_property
    def _to_theirs(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_pattern(ours), theirs) for ours, theirs in self.weights.items()]

    def our_name(self, foreign_name: str) -> str | None:
        """Our name of a foreign weight, or None."""
        return _rename(foreign_name, self._to_ours)

    def foreign_name(self, our_name: str) -> str | None:
        """The foreign name of one of our weights, or None."""
        return _rename(our_name, self._to_theirs)

    def ignores(self, foreign_name: str) -> bool:
        return any(_pattern(p).fullmatch(foreign_name) for p in self.ignored_weights)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{layer\}", r"(?P<layer>\d+)"))


def _rename(name: str, table: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, target in table:
        if match := pattern.fullmatch(name):
            return target.format(**match.groupdict())
    return None
