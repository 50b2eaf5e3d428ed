"""Rotation that differs by layer, and by the length of the text."""

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from anyformer.modeling.interop import import_model

FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16} | FACTORS


def ids(*shape, seed=1):
    return torch.randint(3, 101, shape, generator=torch.Generator().manual_seed(seed))


def test_a_base_for_each_layer_equals_the_same_by_layer_type(tiny):
    window = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}
    thetas = {"full_attention": 100.0, "sliding_attention": 5e5}
    nested = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    by_type = tiny(rope_parameters=nested, **window)
    by_layer = tiny(rope_thetas=[100, 5e5])
    by_layer.load_state_dict(by_type.state_dict())
    tokens = ids(2, 12)
    assert torch.equal(by_layer(tokens).logits, by_type(tokens).logits)
    assert len(by_layer.model.positions.tables) == 2
    one = tiny(rope_thetas=[100, 100])
    one.load_state_dict(by_type.state_dict())
    assert len(one.model.positions.tables) == 1
    assert not torch.allclose(one(tokens).logits, by_type(tokens).logits, atol=1e-3)


def test_a_pattern_of_bases_is_repeated_and_saved(tiny, tmp_path):
    model = tiny(num_hidden_layers=3, rope_thetas=[100, 1000])
    assert model.config.rope_thetas == [100, 1000, 100]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(ids(1, 9)).logits, model(ids(1, 9)).logits)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_across_the_original_length_equals_that_without_a_cache(tiny, cache, padded):
    model = tiny(rope_parameters=dict(LONGROPE), max_position_embeddings=64)
    tokens, mask = ids(1, 12), torch.ones(1, 12, dtype=torch.long)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = model.generate(tokens, attention_mask=mask, use_cache=False, **options)[:, 12:]
    if padded:  # the width crosses the original length before the text does
        tokens, mask = torch.nn.functional.pad(tokens, (3, 0)), torch.nn.functional.pad(mask, (3, 0))
    got = model.generate(tokens, attention_mask=mask, cache_implementation=cache, **options)
    assert got[:, tokens.shape[1] :].tolist() == expected.tolist()


def test_generation_across_the_original_length_equals_stock_phi3():
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Phi3Config(
        **sizes,
        **ends,
        initializer_range=0.3,
        original_max_position_embeddings=16,
        rope_parameters=LONGROPE | {"partial_rotary_factor": 1.0},
    )
    stock = Phi3ForCausalLM(config).eval()
    model = import_model(stock)[0].eval()
    tokens = ids(1, 12)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    assert model.generate(tokens, **options).tolist() == stock.generate(tokens, **options).tolist()
