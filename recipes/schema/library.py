"""Models of the fields that library classes take, read from their source, with the limits they do not check."""

import functools
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, create_model

from ..introspection import StrictModel, class_constant, class_fields, enum_values
from .fields import Kind, Section, raise_wrong, refuse

# Types that replace those that the trainers' sources declare.
LOG_LEVELS = Literal["debug", "info", "warning", "error", "critical", "detail", "passive"]
# The library's optimisers, and ours: `recipes/training/optimizers.py`.
OPTIMIZERS = Literal[(*enum_values("transformers.training_args", "OptimizerNames"), "muon")]  # type: ignore[valid-type]
TYPES: dict[str, Any] = {"log_level_replica": LOG_LEVELS, "optim": OPTIMIZERS}
ARCHITECTURE_REFUSED = {
    "dtype": "is model.dtype",
    **dict.fromkeys(
        ("architectures", "auto_map", "transformers_version"), "is written when the model is saved; remove it"
    ),
}

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
    "seed": Field(ge=0, le=2**32 - 1),  # what NumPy takes
    "data_seed": _NOT_NEGATIVE,
    "num_generations": Field(ge=2),  # an answer is compared with the others
    "num_generations_eval": _AT_LEAST_ONE,
    "max_completion_length": _AT_LEAST_ONE,
    "generation_batch_size": _AT_LEAST_ONE,
    "steps_per_generation": _AT_LEAST_ONE,
    "num_iterations": _AT_LEAST_ONE,
    "temperature": _POSITIVE,
    "top_p": Field(gt=0, le=1),
    "top_k": _NOT_NEGATIVE,
    "min_p": _SHARE,
    "repetition_penalty": _POSITIVE,
    "epsilon": _POSITIVE,
    "epsilon_high": _POSITIVE,
    "delta": _POSITIVE,
    "sapo_temperature_neg": _POSITIVE,
    "sapo_temperature_pos": _POSITIVE,
    "top_entropy_quantile": _SHARE,
    "ref_model_sync_steps": _AT_LEAST_ONE,
    "ref_model_mixup_alpha": _SHARE,
    "output_dir": Field(min_length=1),
    "r": _AT_LEAST_ONE,
    "lora_alpha": _AT_LEAST_ONE,
    "lora_dropout": _BELOW_ONE,
    "encoder_hidden_size": _AT_LEAST_ONE,
    "encoder_num_layers": _AT_LEAST_ONE,
    "encoder_dropout": _BELOW_ONE,
    "max_steps": AfterValidator(
        lambda n: n if n >= 1 or n == -1 else raise_wrong("must be at least 1, or -1 for num_train_epochs")
    ),
}


@functools.cache
def library_model(name: str, kind: Kind, base: type[Section]) -> type[Section]:
    """A pydantic model of a library class's fields on top of our own ones."""
    assert kind.config is not None
    fields: dict[str, Any] = {}
    for item in class_fields(*kind.config).values():
        if item.name in base.model_fields:
            continue
        if item.name in kind.refused:
            checked: Any = Annotated[Any, refuse(kind.refused[item.name])]
        else:
            checked = (TYPES | kind.types).get(item.name, item.type)
            if item.name in LIMITS:
                checked = Annotated[checked, LIMITS[item.name]]
        fields[item.name] = (checked, None)
    model = create_model(name, __base__=base, **fields)
    model.own = base.own
    return model


@functools.cache
def architecture_model() -> type[BaseModel]:
    """The fields of AnyformerConfig, and the other spellings it accepts for them."""
    where = ("anyformer.modeling.configuration_anyformer", "AnyformerConfig")
    fields = class_fields(*where)
    types = {name: item.type for name, item in fields.items()}
    spellings = class_constant(*where, "attribute_map")
    if isinstance(spellings, dict):
        types |= {other: types[name] for other, name in spellings.items() if name in types}
    types |= {name: Annotated[Any, refuse(remedy)] for name, remedy in ARCHITECTURE_REFUSED.items()}
    checked: dict[str, Any] = {name: (kind, None) for name, kind in types.items()}
    return create_model("AnyformerConfig", __base__=StrictModel, **checked)
