"""Processes that are handed their parts of the weights hold none before."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyformer import AnyformerConfig, AnyformerForCausalLM
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.models import empty_model
from anyformer.recipes.parallel.limits import gets_its_part_later
from anyformer.recipes.parallel.strategy import Parallel

SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8}
SMALL = SIZES | {"hidden_size": 32, "intermediate_size": 64}


# In a process of its own: what earlier tests gave back would be taken again without a trace.
MEMORY = """
import os
from pathlib import Path

import torch

from anyformer import AnyformerConfig
from anyformer.recipes.models import empty_model


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


empty_model(AnyformerConfig(vocab_size=50, {small}), "causal_lm", "sdpa", torch.float32)  # what is loaded for the first
before = resident()
model = empty_model(AnyformerConfig(vocab_size=50_000, {sizes}), "causal_lm", "sdpa", torch.float32)
size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
taken = resident() - before
held = torch.zeros(size // 16)
print(size, taken, resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="memory is read from /proc")
def test_an_empty_model_takes_no_memory():
    source = MEMORY.format(sizes=_keywords(SIZES), small=_keywords(SMALL))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    size, taken, with_a_fourth = map(int, done.stdout.split())
    assert size > 400e6 and taken < size / 20
    assert with_a_fourth > size / 5  # so much would be seen


def _keywords(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def test_it_is_the_model_but_for_the_values_of_its_weights():
    config = AnyformerConfig(vocab_size=50, **SMALL)
    empty = empty_model(copy.deepcopy(config), "causal_lm", "sdpa", torch.float32)
    usual = AnyformerForCausalLM(config)
    shapes = [[(name, p.shape, p.dtype) for name, p in model.named_parameters()] for model in (empty, usual)]
    assert shapes[0] == shapes[1]
    buffers = [dict(model.named_buffers()) for model in (empty, usual)]
    assert buffers[0].keys() == buffers[1].keys()
    assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[0])


@pytest.mark.parametrize(
    ("strategy", "rank", "check", "overrides", "expected"),
    [
        ("fsdp2", 1, False, [], True),
        ("fsdp2", 0, False, [], False),  # it reads what it hands out
        ("ddp", 1, False, [], False),
        ("tp", 1, False, [], False),
        ("fsdp2", 1, True, [], False),  # the checks run before the weights are handed out
        ("fsdp2", 1, False, ["adapter={kind: lora, init_lora_weights: pissa}"], False),  # made of the weights
        ("fsdp2", 1, False, ["adapter={kind: lora, r: 4}"], True),
    ],
)
def test_who_reads_no_weights(strategy, rank, check, overrides, expected):
    recipe = load_recipe("pretrain", overrides)
    assert gets_its_part_later(recipe, Parallel(strategy, 2, rank), check=check) == expected
