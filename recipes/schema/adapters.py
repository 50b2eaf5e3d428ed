"""Section `adapter`: the keys of each kind, and what PEFT's own config class may not be given."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from ..adapters.saved import read_config
from .fields import Kind, Section, wrong


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
        raise wrong("a soft prompt changes no weight, so there is nothing to merge: remove the key")
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


_PEFT_DECIDES = "is set by the suite; remove it"
PEFT_REFUSED = {
    **dict.fromkeys(("peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version"), _PEFT_DECIDES),
    "base_model_name_or_path": "is model.path; remove it",
    "revision": "is model.revision; remove it",
}
_LORA_REFUSED = PEFT_REFUSED | {
    "runtime_config": "cannot be written in a recipe; remove it",
    "megatron_config": "cannot be written in a recipe; remove it",
    "megatron_core": "cannot be written in a recipe; remove it",
}
_SOFT_REFUSED = PEFT_REFUSED | {
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
    "ia3": Kind(Ia3Adapter, ("peft.tuners.ia3.config", "IA3Config"), refused=PEFT_REFUSED),
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
