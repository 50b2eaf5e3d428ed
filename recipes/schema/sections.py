"""The sections that hold the same keys in every recipe: model, data, eval, logging and hub."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from ..yaml_tree import kind_of
from .fields import PathText, Section, refuse, wrong
from .library import architecture_model
from .sources import Columns, Format, OnBadRow, Source


def _repo(value: str) -> str:
    """The Hub's own rule for repository ids, with the namespace required."""
    owner, slash, name = value.partition("/")
    if not slash:
        raise wrong("has no namespace: write user/name or organisation/name")
    part = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
    good = part.fullmatch(owner) and part.fullmatch(name) and not re.search(r"--|\.\.|\.git$", value)
    if not good or len(value) > 96:
        raise wrong(
            "is no repository id: write user/name in letters, digits, '-', '_' and '.', at most 96 in all, without "
            "'--' or '..', and neither part beginning or ending with '-' or '.'"
        )
    return value


def _architecture(value: Any) -> Any:
    if not isinstance(value, dict):
        raise wrong(f"must be a mapping, found {kind_of(value)}")
    architecture_model().model_validate(value)
    return value


class Quantization(Section):
    """`model.quantization`: the arguments of `transformers.BitsAndBytesConfig`, under its names and with its defaults.

    That class is no dataclass, so its arguments are listed here; a test compares the list with its signature.
    """

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    bnb_4bit_quant_storage: Literal["uint8", "float16", "bfloat16", "float32"] = "uint8"
    llm_int8_threshold: Annotated[float, Field(ge=0)] = 6.0
    llm_int8_skip_modules: list[str] | None = None
    llm_int8_has_fp16_weight: Annotated[Any, refuse("keeps a second copy of the weights in 16 bits: remove it")] = None
    llm_int8_enable_fp32_cpu_offload: Annotated[Any, refuse("is for inference on two devices: remove it")] = None

    @property
    def bits(self) -> int:
        return 4 if self.load_in_4bit else 8

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `BitsAndBytesConfig`: what the recipe gives."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


class ContextExtension(Section):
    """`model.context_extension`: scale a checkpoint's rotary embedding to texts of `length` tokens; see
    `recipes.context_extension`."""

    method: Literal["linear", "ntk", "yarn", "longrope"]
    length: Annotated[int, Field(ge=2)]


class ModelSection(Section):
    """`model`: what is trained. Exactly one of `path` and `preset`."""

    path: PathText | None = None
    preset: str | None = None
    config: Annotated[dict[str, Any], PlainValidator(_architecture)] = Field(default_factory=dict)
    tokenizer: PathText | None = None
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    attn_implementation: Literal[
        "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"
    ] = "sdpa"
    trust_remote_code: bool = False
    verify_import: bool = True
    quantization: Quantization | None = None
    context_extension: ContextExtension | None = None


class DataSection(Section):
    """`data`: what it is trained on. `eval_fraction` is 0 where `eval_source` names held-out data."""

    source: Source
    format: Format = "auto"
    columns: Columns = Field(default_factory=dict)
    on_bad_row: OnBadRow = "error"
    max_rows: Annotated[int, Field(ge=1)] | None = None
    epoch_rows: Annotated[int, Field(ge=1)] | None = None
    streaming: bool = False
    eval_source: Source | None = None
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    max_eval_rows: Annotated[int, Field(ge=1)] | None = None
    truncation: Literal["drop", "keep_start", "keep_end", "split"] = "drop"
    seed: Annotated[int, Field(ge=0)] = 0
    num_proc: Annotated[int, Field(ge=1)] | None = None
    cache: bool = True

    @model_validator(mode="after")
    def _one_source_of_held_out_rows(self) -> "DataSection":
        if self.eval_source is not None:
            self.eval_fraction = 0.0
        return self


# Rows of an optimiser step over all processes: the only key of `train` that is not the trainer's own.
GLOBAL_BATCH = "global_batch_size"


class TrainSection(Section):
    """What stands in `train` beside the arguments of the trainer."""

    global_batch_size: Annotated[int, Field(ge=1)] | None = None


class EvalSection(Section):
    """`eval`: what is measured and shown beside the loss."""

    samples: Annotated[int, Field(ge=0)] = 3
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    before: bool = True
    batch_size: Annotated[int, Field(ge=1)] = 8


class LoggingSection(Section):
    """`logging`: the loss curve, how much is said, and what the MFU is a share of: the dense TFLOP/s of one device."""

    plot: bool = True
    level: Literal["debug", "info", "warning", "error"] = "info"
    peak_tflops: Annotated[float, Field(gt=0)] | None = None


class HubSection(Section):
    """`hub`: where the result is pushed."""

    repo: Annotated[str, AfterValidator(_repo)]
    private: bool = True
    revision: str | None = None
    commit_message: str | None = None
