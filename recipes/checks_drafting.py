"""What no single key of a recipe for a drafter can see."""

from collections.abc import Iterator
from typing import Any

from . import schema
from .yaml_tree import Path, show

Fault = tuple[Path, str]
# Keys that say how the model is asked for answers.
_ASKING = ("max_new_tokens", "prompts_per_text")


def across_drafting(kind: str, sections: dict[str, dict[str, Any]]) -> Iterator[Fault]:
    """Faults of a recipe whose objective trains a drafter: the model that it drafts for stays as it is."""
    model, data, objective = sections["model"], sections["data"], sections["objective"]
    if isinstance(model.get("preset"), str) and model.get("path") is None:
        text = f"{kind} trains a drafter for a model that can write already: name one in model.path"
        yield ("model", "preset"), text
    if model.get("quantization") is not None:
        text = (
            f"{kind} reads the states of the model that the drafter will work with, and these would be of another one"
        )
        yield ("model", "quantization"), f"{text}: remove it"
    adapter = schema.kind_in("adapter", sections["adapter"])
    if adapter != "none":
        text = f"{adapter} would change the model, and {kind} trains a drafter for it as it is: remove the section, or"
        yield ("adapter", "kind"), f"{text} train and merge the adapter first and name that run in model.path"
    if objective.get("answers", "base") == "data":
        for name in _ASKING:
            if objective.get(name) is not None:
                yield ("objective", name), "has no effect with answers: data, where the model writes nothing: remove it"
    elif data.get("truncation") not in (None, "drop"):
        text = f"{show(data['truncation'])} has no effect: a prompt is read whole, and of a text pieces of"
        yield (
            ("data", "truncation"),
            f"{text} objective.max_length are taken. Remove it, or set objective.answers: data",
        )
