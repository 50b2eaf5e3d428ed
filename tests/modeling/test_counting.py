"""What a config says about itself, against the built model."""

import pytest
import torch
from test_model import VARIANTS
from torch.utils.flop_counter import FlopCounterMode

from anyformer import AnyformerConfig, AnyformerForCausalLM
from anyformer.recipes.loading import load_preset, shipped

PARTS = {
    "embeddings": ("embed_tokens",),
    "attention": ("self_attn",),
    "mlp": (".mlp.",),
    "norms": ("norm",),
    "head": ("lm_head",),
}


def by_part(model):
    counted = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():  # a tied head appears once, as the embedding
        part = next(p for p, marks in PARTS.items() if any(mark in name for mark in marks))
        counted[part] += parameter.numel()
    return counted


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_parameters_flops_and_cache_of_each_variant(tiny, fields):
    model = tiny(attn_implementation="eager", **fields)  # torch does not count the CPU kernel of sdpa
    counts = model.config.counts(sequence_length=24)
    assert counts.parameters == by_part(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        cache = model(torch.ones(1, 24, dtype=torch.long)).cache
    assert counter.get_total_flops() == pytest.approx(counts.forward_flops, rel=0.01)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 24 * counts.cache_bytes_per_token(4)


@pytest.mark.parametrize("name", shipped("models"))
def test_parameters_of_each_preset(name):
    config = AnyformerConfig(**load_preset(name))
    with torch.device("meta"):
        model = AnyformerForCausalLM(config)
    assert config.counts().parameters == by_part(model)


KNOWN = {"llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "smollm2-135m": 134_515_008}


@pytest.mark.parametrize(("name", "parameters"), KNOWN.items())
def test_published_parameter_counts(name, parameters):
    assert AnyformerConfig(**load_preset(name)).counts().total_parameters == parameters


def test_llama_3_70b_cache_at_32768_tokens_in_half_precision():
    counts = AnyformerConfig(**load_preset("llama-3-70b")).counts()
    assert 32768 * counts.cache_bytes_per_token(2) == 10_737_418_240


def test_an_unknown_variant_is_not_guessed():
    from anyformer.modeling import MLPS
    from anyformer.modeling.mlp import DenseMLP

    MLPS.register("test_uncounted")(type("Uncounted", (DenseMLP,), {}))
    with pytest.raises(NotImplementedError, match="test_uncounted"):
        AnyformerConfig(mlp="test_uncounted").counts()
