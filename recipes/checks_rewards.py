"""What no single key of a recipe on rewards can see."""

from collections.abc import Iterator
from typing import Any

from . import schema
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
