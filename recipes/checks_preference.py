"""What no single key of a recipe on preferences can see."""

from collections.abc import Iterator
from typing import Any

from . import schema
from .yaml_tree import Path

Fault = tuple[Path, str]

# Starts of LoRA that leave the model exactly as it is, so that the model with the adapter disabled is its reference.
NEUTRAL_STARTS = (True, "gaussian", "mica")
# DPO losses that are functions of the difference of both sides' rewards, or of neither (Wang et al. 2023).
F_DIVERGENCE_LOSSES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
SMOOTHED_LOSSES = {"robust", "exo_pair", "aot", "aot_unpaired"}


def across_preference(kind: str, sections: dict[str, dict[str, Any]]) -> Iterator[Fault]:
    """Faults of a recipe whose objective is of `kind`; none for objectives without preferences."""
    train = schema.OBJECTIVES[kind].defaults | sections["train"]
    if kind in ("dpo", "kto"):
        yield from _reference(train, sections["adapter"])
    if kind == "dpo":
        yield from _dpo(train)
    if kind == "kto" and train.get("loss_type", "kto") == "kto":
        yield from _kto(train)
    if kind in ("cpo", "simpo") and train.get("label_smoothing") and train.get("loss_type") in ("hinge", "ipo"):
        yield ("train", "label_smoothing"), f"has no effect on the loss {train['loss_type']}; remove it"


def _reference(train: dict[str, Any], adapter: dict[str, Any]) -> Iterator[Fault]:
    entry = schema.ADAPTERS.get(schema.kind_in("adapter", adapter))
    adapted = entry is not None and not getattr(entry.section, "in_place", False)
    if train.get("sync_ref_model") is True:
        if adapted:
            text = "moves a reference model, which an adapter does without: set adapter.kind to none, or remove the key"
            yield ("train", "sync_ref_model"), text
        if train.get("precompute_ref_log_probs") is True:
            text = "takes the reference as it is at the start, but sync_ref_model moves it: remove one of the two"
            yield ("train", "precompute_ref_log_probs"), text
    start = adapter.get("init_lora_weights", True)
    if adapted and start not in NEUTRAL_STARTS and start is not None:
        shown = str(start).lower() if isinstance(start, bool) else start
        text = f"{shown} changes the model before the first step, so that it is no reference: use true or gaussian"
        yield ("adapter", "init_lora_weights"), text


def _dpo(train: dict[str, Any]) -> Iterator[Fault]:
    given = train.get("loss_type", "sigmoid")
    losses = given if isinstance(given, list) else [given]
    weights = train.get("loss_weights")
    if weights is not None and len(weights) != len(losses):
        yield ("train", "loss_weights"), f"holds {len(weights)} weights for {len(losses)} losses in loss_type"
    smoothing = train.get("label_smoothing")
    if smoothing and not SMOOTHED_LOSSES & set(losses):
        text = f"has no effect on the loss {', '.join(losses)}; for noisy labels set loss_type to robust"
        yield ("train", "label_smoothing"), text
    if "exo_pair" in losses and not smoothing:
        yield ("train", "loss_type"), "exo_pair needs label_smoothing above 0: set train.label_smoothing to 1e-3"
    divergence = train.get("f_divergence_type", "reverse_kl")
    if divergence != "reverse_kl" and not set(losses) <= F_DIVERGENCE_LOSSES:
        other = ", ".join(sorted(set(losses) - F_DIVERGENCE_LOSSES))
        yield ("train", "f_divergence_type"), f"{divergence} is not defined for the loss {other}: remove it"
    if train.get("use_weighting") is True and {"aot", "aot_unpaired"} & set(losses):
        yield ("train", "use_weighting"), "weighs single pairs, but aot sorts a batch: remove one of the two"


def _kto(train: dict[str, Any]) -> Iterator[Fault]:
    remedy = "or set loss_type to apo_zero_unpaired, which estimates none"
    if train.get("train_sampling_strategy", "sequential") != "sequential":
        text = f"must be sequential: the KL divergence is estimated on fixed neighbours. Remove it, {remedy}"
        yield ("train", "train_sampling_strategy"), text
    if train.get("per_device_train_batch_size") == 1:
        text = f"must be at least 2: the KL divergence is estimated on a batch's other answers. Raise it, {remedy}"
        yield ("train", "per_device_train_batch_size"), text
