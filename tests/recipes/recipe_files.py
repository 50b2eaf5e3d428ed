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


# Adapter sections by a name for each.
SOFT = {
    "prompt-tuning": "{kind: prompt-tuning, num_virtual_tokens: 6}",
    "p-tuning": "{kind: p-tuning, num_virtual_tokens: 6, encoder_hidden_size: 24}",
    "p-tuning-lstm": "{kind: p-tuning, num_virtual_tokens: 6, encoder_reparameterization_type: LSTM}",
    "prefix-tuning": "{kind: prefix-tuning, num_virtual_tokens: 6}",
    "prefix-projected": "{kind: prefix-tuning, num_virtual_tokens: 6, prefix_projection: true}",
}
MERGED = {
    "rslora": "{kind: lora, r: 4, use_rslora: true}",
    "pissa": "{kind: lora, r: 4, init_lora_weights: pissa}",
    "olora": "{kind: lora, r: 4, init_lora_weights: olora}",
    "orthogonal": "{kind: lora, r: 4, init_lora_weights: orthogonal}",
    "mica": "{kind: lora, r: 4, init_lora_weights: mica}",
    "lora-plus": "{kind: lora, r: 4, lora_plus_lr_ratio: 4}",
    "parts": "{kind: lora, r: 4, target_parts: [mlp]}",
    "head": "{kind: lora, r: 4, modules_to_save: [lm_head]}",
    "ia3": "{kind: ia3}",
}
