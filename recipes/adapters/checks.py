"""What an `adapter` section and the rest of a recipe cannot mean together, found while the recipe is read."""

from collections.abc import Iterable, Iterator
from typing import Any

from ..yaml_tree import STAGE
from . import saved

Fault = tuple[tuple[int | str, ...], str]
# Objectives whose trainer and measure are exact behind a soft prompt.
WITH_SOFT_PROMPTS = ("sft", "pretrain", "seq2seq")
_ADDS_A_LAYER = "it adds a layer, which the base that a soft prompt is kept apart from would lack"
_SHIFTED = "PEFT has no task for its head, so the labels would not be moved behind the virtual tokens"
_LOG_PROBS = "its trainer takes log-probabilities in a way of its own, which is not verified behind a soft prompt"
_ROLLOUTS = "its trainer generates and scores in a way of its own, which is not verified behind a soft prompt"
# Why the others are not.
NO_SOFT_PROMPTS = {
    **dict.fromkeys(("classify", "token-classify", "reward"), _ADDS_A_LAYER),
    **dict.fromkeys(("mlm", "mlm-nsp"), _SHIFTED),
    **dict.fromkeys(("dpo", "kto", "orpo", "cpo", "simpo"), _LOG_PROBS),
    **dict.fromkeys(("grpo", "rloo", "ppo"), _ROLLOUTS),
    "distill": "it compares distributions position by position, and the teacher's have no virtual tokens before them",
}
# Starts that are computed from the base's own weights, which a quantised base no longer has.
_FROM_WEIGHTS = ("pissa", "olora", "loftq", "mica", "orthogonal")


def across_adapter(sections: dict[str, dict[str, Any]], kind: str, fields: Iterable[str]) -> Iterator[Fault]:
    """Faults of the adapter section.

    Args:
        sections: the recipe's plain data by section.
        fields: names of PEFT's config class for this kind.
    """
    adapter = sections["adapter"]
    if isinstance(adapter.get("path"), str):
        yield from _continued(adapter, kind, fields)
    if kind == "lora":
        yield from _lora(adapter)
    elif kind == "ia3":
        yield from _ia3(adapter)
    elif kind in saved.SOFT_PROMPTS:
        objective = str(sections["objective"].get("kind") or "sft")
        if objective not in WITH_SOFT_PROMPTS:
            why = NO_SOFT_PROMPTS.get(objective, "it is not verified behind a soft prompt")
            remedy = f"choose lora, or an objective among {', '.join(WITH_SOFT_PROMPTS)}"
            yield ("adapter", "kind"), f"{kind} is not offered with objective {objective}: {why}; {remedy}"
            return
        yield from _soft_prompt(sections, kind)
    if isinstance(sections["model"].get("quantization"), dict):
        yield from _quantized(adapter, kind, sections["model"]["quantization"])


def _continued(adapter: dict[str, Any], kind: str, fields: Iterable[str]) -> Iterator[Fault]:
    """The folder's own config decides; what the recipe repeats must agree with it."""
    path = adapter["path"]
    if path.startswith(STAGE):  # not made yet, see `stages`
        return
    try:
        found, held = saved.kind_of_saved(path), saved.read_config(path)
    except saved.BadAdapterError as error:
        yield ("adapter", "path"), str(error)
        return
    if kind != found:
        yield ("adapter", "kind"), f"{path} holds an adapter of kind {found}: write {found}, or leave kind out"
        return
    if adapter.get("target_parts") is not None:
        yield ("adapter", "target_parts"), f"the adapter in {path} has its places already: remove the key"
    for name in fields:
        if name in adapter and _plain(adapter[name]) != _plain(held.get(name)):
            text = f"the adapter in {path} was made with {held.get(name)!r}, which cannot be changed: remove the key"
            yield ("adapter", name), text


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, list) else value


def _lora(lora: dict[str, Any]) -> Iterator[Fault]:
    if lora.get("merge", True) is not False:
        for name in ("alora_invocation_tokens", "arrow_config", "layer_replication"):
            if lora.get(name) is not None:
                yield ("adapter", "merge"), f"an adapter with {name} cannot be merged: set adapter.merge to false"
        if lora.get("use_qalora") is True:
            yield ("adapter", "merge"), "a QALoRA adapter cannot be merged: set adapter.merge to false"
    parts = lora.get("target_parts")
    if parts is not None and lora.get("target_modules") is not None:
        yield ("adapter", "target_parts"), "target_modules names the places already: remove one of the two"
    if isinstance(lora.get("target_modules", "all-linear"), str | None):
        for name in ("layers_to_transform", "layers_pattern"):
            if lora.get(name) is not None and parts is None:
                yield ("adapter", name), "needs target_modules as a list of module names, such as [q_proj, v_proj]"
    if lora.get("layers_pattern") and lora.get("layers_to_transform") is None:
        yield ("adapter", "layers_pattern"), "has no meaning without layers_to_transform"
    if lora.get("lora_bias") is True and (
        lora.get("use_dora") is True or isinstance(lora.get("init_lora_weights"), str)
    ):
        yield ("adapter", "lora_bias"), "works neither with use_dora nor with a named init_lora_weights"
    if lora.get("init_lora_weights") == "loftq" and not lora.get("loftq_config"):
        yield ("adapter", "init_lora_weights"), "loftq needs adapter.loftq_config"
    stacked = "target_parameters" if lora.get("target_parameters") else None
    if isinstance(parts, list) and "experts" in parts:
        stacked = "target_parts"
    if stacked and (lora.get("lora_dropout") or lora.get("use_dora") is True):
        why = (
            "experts are stacked parameters, of which PEFT adapts" if stacked == "target_parts" else "PEFT adapts these"
        )
        text = f"{why} without dropout and DoRA alone: it allows neither lora_dropout nor use_dora"
        yield ("adapter", stacked), text
    if lora.get("lora_plus_lr_embedding") is not None and lora.get("lora_plus_lr_ratio") is None:
        yield ("adapter", "lora_plus_lr_embedding"), "has no meaning without lora_plus_lr_ratio"


def _ia3(ia3: dict[str, Any]) -> Iterator[Fault]:
    targets, forward = ia3.get("target_modules"), ia3.get("feedforward_modules")
    if isinstance(targets, list) and forward is None:
        text = "target_modules is given, so say which of them scale their input: a list, [] for none"
        yield ("adapter", "feedforward_modules"), text
    if isinstance(targets, list) and isinstance(forward, list):
        if other := sorted(set(map(str, forward)) - set(map(str, targets))):
            text = f"names {', '.join(other)}, which target_modules does not: add them there"
            yield ("adapter", "feedforward_modules"), text
    elif forward is not None and targets is None:
        yield ("adapter", "target_modules"), "feedforward_modules is given, so name all modules that are scaled here"


def _soft_prompt(sections: dict[str, dict[str, Any]], kind: str) -> Iterator[Fault]:
    adapter, train, model = sections["adapter"], sections["train"], sections["model"]
    if train.get("packing") is True and _architecture(model).get("architecture") == "encoder-decoder":
        yield (
            ("train", "packing"),
            "PEFT puts a soft prompt before the first pair of a packed row alone: set it to false",
        )
    if kind == "prefix-tuning" and _architecture(model).get("attention") == "mla":
        yield (
            ("adapter", "kind"),
            "attention mla caches one latent a token, and a prefix is keys and values: use prompt-tuning, p-tuning or "
            "lora",
        )
    start, first = adapter.get("prompt_tuning_init", "RANDOM"), adapter.get("prompt_tuning_init_text")
    if start == "TEXT" and not first:
        yield ("adapter", "prompt_tuning_init_text"), "is missing: prompt_tuning_init is TEXT"
    if first and start != "TEXT":
        yield ("adapter", "prompt_tuning_init_text"), "has no meaning unless prompt_tuning_init is TEXT"
    lstm = adapter.get("encoder_reparameterization_type") == "LSTM"
    for name in ("encoder_num_layers", "encoder_dropout"):
        if adapter.get(name) is not None and kind == "p-tuning" and not lstm:
            text = "only the LSTM has it: set encoder_reparameterization_type to LSTM, or remove the key"
            yield ("adapter", name), text
    if kind == "prefix-tuning" and adapter.get("encoder_hidden_size") and adapter.get("prefix_projection") is not True:
        yield ("adapter", "encoder_hidden_size"), "has no meaning unless prefix_projection is true"


def _architecture(model: dict[str, Any]) -> dict[str, Any]:
    """What the recipe alone tells of the architecture: the preset's fields, and those it sets."""
    from ..loading import load_preset

    fields: dict[str, Any] = {}
    if isinstance(model.get("preset"), str):
        try:
            fields = load_preset(model["preset"])
        except ValueError:  # an unknown preset is a fault of its own
            fields = {}
    given = model.get("config")
    return fields | (given if isinstance(given, dict) else {})


def _quantized(adapter: dict[str, Any], kind: str, quantization: dict[str, Any]) -> Iterator[Fault]:
    if kind in ("none", "freeze"):
        yield (
            ("model", "quantization"),
            f"quantised weights cannot be trained, and adapter.kind is {kind}: choose an adapter such as lora, or "
            "leave model.quantization out",
        )
    path = adapter.get("path")
    held: dict[str, Any] = {}
    if isinstance(path, str) and not path.startswith(STAGE):
        try:
            held = saved.read_config(path)
        except saved.BadAdapterError:  # a fault of its own
            held = {}
    if quantization.get("load_in_8bit") is True and (adapter.get("use_dora") or held.get("use_dora")) is True:
        yield (
            ("adapter", "path" if held.get("use_dora") else "use_dora"),
            "DoRA takes the norms of the base's matrices, which PEFT does not read from 8-bit weights: choose "
            "load_in_4bit: true, or an adapter without DoRA",
        )
    begun = held.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(_FROM_WEIGHTS):
        yield (
            ("adapter", "path"),
            f"the adapter in {path} started from its base's own weights (init_lora_weights: {begun}), which "
            "model.quantization rounds: leave model.quantization out, or merge the adapter and train a new one",
        )
        return
    start = adapter.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_FROM_WEIGHTS):
        yield (
            ("adapter", "init_lora_weights"),
            f"{start} starts from the base's own weights, which model.quantization rounds: choose true or gaussian",
        )
    if adapter.get("layer_replication") is not None:
        yield ("adapter", "layer_replication"), "copies layers, which quantised weights do not allow: remove the key"


def across_quantization(model: dict[str, Any]) -> Iterator[Fault]:
    """Faults of `model.quantization`."""
    given = model.get("quantization")
    if not isinstance(given, dict):
        return
    here = ("model", "quantization")
    four, eight = given.get("load_in_4bit") is True, given.get("load_in_8bit") is True
    if four == eight:
        yield here, "needs exactly one of load_in_4bit: true and load_in_8bit: true"
        return
    for name in given:
        if (name.startswith("bnb_4bit_") and eight) or (name == "llm_int8_threshold" and four):
            yield (*here, name), f"has no effect with load_in_{4 if four else 8}bit: remove it"
