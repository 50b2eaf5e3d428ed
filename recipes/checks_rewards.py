"""What no single key of a recipe on rewards can see."""

from collections.abc import Iterator
from typing import Any

from . import schema
from .checks_preference import NEUTRAL_STARTS
from .introspection import class_fields
from .yaml_tree import Path

Fault = tuple[Path, str]


def across_rewards(kind: str, sections: dict[str, dict[str, Any]]) -> Iterator[Fault]:
    """Faults of a recipe whose objective is of `kind`: keys that it does not read, rewards without a weight."""
    for (section, name), remedy in schema.OBJECTIVES[kind].unread.items():
        if sections[section].get(name) is not None:
            yield (section, name), remedy
    given, weights = sections["objective"].get("reward"), sections["train"].get("reward_weights")
    if isinstance(given, str | list) and isinstance(weights, list):
        rewards = [given] if isinstance(given, str) else given
        if len(weights) != len(rewards):
            named = "one reward" if len(rewards) == 1 else f"{len(rewards)} rewards"
            text = f"holds {len(weights)} weights for {named} in objective.reward: give one for each"
            yield ("train", "reward_weights"), text
    if kind in ("grpo", "rloo"):
        yield from _reference(kind, sections)


def _reference(kind: str, sections: dict[str, dict[str, Any]]) -> Iterator[Fault]:
    """The model without a fresh adapter is the reference, so that the adapter must leave it as it is at its start."""
    train, adapter, config = sections["train"], sections["adapter"], schema.OBJECTIVES[kind].config
    assert config is not None
    start = adapter.get("init_lora_weights", True)
    fresh = schema.kind_in("adapter", adapter) == "lora" and adapter.get("path") is None
    penalty = train.get("beta", class_fields(*config)["beta"].default)
    if fresh and penalty and start not in (*NEUTRAL_STARTS, None):
        shown = str(start).lower() if isinstance(start, bool) else start
        text = f"{shown} changes the model before the first step, so that it is no reference: use true or gaussian"
        yield ("adapter", "init_lora_weights"), f"{text}, or set train.beta to 0"
