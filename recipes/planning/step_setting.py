"""From a recipe to the setting of one of its steps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..introspection import UNKNOWN, class_fields
from ..objectives import objective_class
from ..parallel.strategy import check_shared
from ..schema import OBJECTIVES, Recipe
from ..schema.sections import GLOBAL_BATCH
from .optimizers import check_known
from .setting import Setting
from .subject import LENGTH, Subject

# Objectives whose step is the model's own loss of a batch.
EXACT = ("pretrain", "sft", "mlm", "mlm-nsp", "seq2seq", "classify", "token-classify", "reward")
# What a step of the others computes, as `Setting.loss` names it.
LOSSES = {"dpo": "log_probs", "kto": "log_probs", "orpo": "logits", "cpo": "logits", "simpo": "answers"}
# Those that read two answers a row.
PAIRS = ("reward", "dpo", "orpo", "cpo", "simpo")
# Those whose step is of another model.
DRAFTERS = ("medusa", "eagle", "mtp")


@dataclass(frozen=True)
class Device:
    """Where a plan is for.

    Attributes:
        memory: bytes of one device; None: not said.
        count: how many.
        kind: whose kernels compute.
    """

    memory: int | None = None
    count: int = 1
    kind: str = "cpu"


@dataclass(frozen=True)
class AskedOfStep:
    """What is asked of a step instead of the recipe's.

    Attributes:
        batch: rows of a forward pass on one device; length: tokens of a row.
    """

    batch: int | None = None
    length: int | None = None


def trainer_value(recipe: Recipe, name: str) -> Any:
    """A field of the trainer's config: the recipe's, else the objective's default, else the library's."""
    entry = OBJECTIVES[recipe.objective.kind]
    if name in recipe.train:
        return recipe.train[name]
    if name in entry.defaults:
        return entry.defaults[name]
    assert entry.config is not None
    found = class_fields(*entry.config).get(name)
    return None if found is None or found.default is UNKNOWN else found.default


def setting_of(
    subject: Subject, device: Device, *, batch: int | None = None, length: int | None = None
) -> tuple[Setting, tuple[str, ...]]:
    """The setting of a step, and what had to be assumed for it.

    Args:
        batch, length: rows of a forward pass and tokens of a row, instead of the recipe's.

    Raises:
        UserError: what the optimiser keeps is not known, the objective trains a drafter, or the devices cannot share
            the rows of a step.
    """
    recipe, config, kind = subject.recipe, subject.config, subject.recipe.objective.kind
    if kind in DRAFTERS:
        raise UserError(
            f"objective.kind: {kind!r} trains a drafter beside its base, which is not planned from the config alone: "
            "`anyformer train NAME --dry-run` says its sizes and steps"
        )
    known = objective_class(kind, config.architecture)
    optimizer = str(trainer_value(recipe, "optim") or "adamw_torch_fused")
    check_known(optimizer)
    rows, per_row = _rows(recipe, device.count, batch), 2 if kind in PAIRS else 1
    target, source = _lengths(subject, length)
    remarks = list(_beyond_the_step(kind))
    if length is None and not subject.bare and not _stated_length(recipe):
        remarks.append(f"rows of {target:,} tokens, the model's longest, as the recipe says no length: --length does")
    packing = getattr(recipe.objective, "packing", None) or recipe.train.get("packing")
    even = packing == "blocks" or (rows[0] * per_row == 1 and not packing)
    setting = Setting(
        config,
        head=known.head,
        task_type=known.task_type,
        dtype="float32" if recipe.model.dtype == "auto" else recipe.model.dtype,
        mixed=_mixed(recipe, device),  # type: ignore[arg-type]
        adapter=recipe.adapter,
        quantization=recipe.model.quantization,
        loss=LOSSES.get(kind, "model"),  # type: ignore[arg-type]
        optimizer=optimizer,
        batch=rows[0] * per_row,
        rows_of_one=per_row,
        accumulation=rows[1],
        length=target,
        source=source,
        supervised=_supervised(subject),
        padding="none" if even else "some",
        checkpointing="layers" if trainer_value(recipe, "gradient_checkpointing") else "none",
        attention=_attention(subject),
        kernels=device.kind,  # type: ignore[arg-type]
        gpus=device.count,
    )
    return setting, tuple(remarks)


def _beyond_the_step(kind: str) -> Iterator[str]:
    """What an objective does beside the step that is planned."""
    if kind in ("dpo", "kto"):
        yield (
            f"objective {kind} also reads its rows with the model as it was before training: a forward pass more than "
            "is counted here, and a copy of the weights where one is kept"
        )
    elif kind not in EXACT and kind not in LOSSES:
        yield (
            f"a step of objective {kind} does more than learn from its batch: what it samples or compares with is not "
            "in these figures"
        )


def _supervised(subject: Subject) -> float:
    """The share of tokens that have a label: as a run has counted them, else what the objective hides, or all."""
    plan = (subject.metrics or {}).get("plan", {})
    if plan.get("supervised_tokens") and plan.get("tokens"):
        return float(plan["supervised_tokens"] / plan["tokens"])
    return float(getattr(subject.recipe.objective, "mlm_probability", 1.0))


def _attention(subject: Subject) -> str:
    """The recipe's; of a bare model that has no sdpa, eager."""
    config, section = subject.config, subject.recipe.model
    changed = config.attention_sinks or config.attn_logit_softcapping is not None
    given = "attn_implementation" in section.model_fields_set
    return "eager" if subject.bare and changed and not given else section.attn_implementation


def _rows(recipe: Recipe, devices: int, batch: int | None) -> tuple[int, int]:
    """Rows of a forward pass, and passes of a step."""
    given = batch or recipe.train.get("per_device_train_batch_size")
    total = recipe.train.get(GLOBAL_BATCH)
    default = trainer_value(recipe, "per_device_train_batch_size")
    if total is None:
        return given or default, trainer_value(recipe, "gradient_accumulation_steps") or 1
    check_shared(total, devices)
    each = total // devices
    rows = given or math.gcd(each, default)
    return rows, max(each // rows, 1)


def _lengths(subject: Subject, length: int | None) -> tuple[int, int]:
    """Tokens of the target and of the source."""
    recipe, config = subject.recipe, subject.config
    longest = config.max_position_embeddings - recipe.adapter.virtual_tokens
    if subject.bare:
        longest = min(longest, LENGTH)
    options, both = recipe.objective, config.architecture == "encoder-decoder"
    if recipe.objective.kind == "seq2seq":
        limits: Sequence[Any] = (options.max_target_length, options.max_source_length)  # type: ignore[attr-defined]
    else:
        limits = 2 * (_stated_length(recipe),)
    target, source = (length or min(limit or longest, longest) for limit in limits)
    return target, source if both else 0


def _stated_length(recipe: Recipe) -> int | None:
    """The longest row by the recipe or its trainer."""
    if recipe.objective.kind == "seq2seq":
        return recipe.objective.max_target_length  # type: ignore[attr-defined]
    return getattr(recipe.objective, "max_length", None) or trainer_value(recipe, "max_length")


def _mixed(recipe: Recipe, device: Device) -> str:
    """What a run computes products in, see `arguments.training_arguments`."""
    from ..arguments import cpu_has_amx

    if recipe.train.get("fp16"):
        return "float16"
    given = recipe.train.get("bf16")
    by_machine = device.kind == "gpu" or cpu_has_amx()
    return "bfloat16" if (by_machine if given is None else given) else "no"
