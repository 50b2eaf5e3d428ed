"""Recipes written for a test, and what is wrong with them."""

import textwrap
from pathlib import Path

import pytest

from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import RecipeError, load_recipe

GOOD = """\
model:
  path: some/model
data:
  source: train.jsonl
"""


def write(text: str | bytes, name: str = "r.yaml") -> str:
    """Write a file into the working directory and return its name."""
    raw = text if isinstance(text, bytes) else textwrap.dedent(text).encode()
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(raw)
    return name


def faults(text: str | bytes, *overrides: str) -> list[str]:
    """The lines of the error that a recipe must raise."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(text), overrides)
    assert isinstance(caught.value, UserError)
    return str(caught.value).splitlines()


def fault(text: str | bytes, *overrides: str) -> str:
    """The one line of the error that a recipe must raise."""
    lines = faults(text, *overrides)
    assert len(lines) == 1, lines
    return lines[0]


def model_section(text: str) -> str:
    return f"data: {{source: a.jsonl}}\nmodel: {text}\n"
