"""The real SmolLM2-135M-Instruct, from its GGUF file."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import anyformer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stock(smollm2_gguf):
    return AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name).eval()


@pytest.fixture(scope="module")
def model(smollm2_gguf):
    return anyformer.from_hf(smollm2_gguf)


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf):
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@torch.no_grad()
def test_logits_within_2e_4_on_512_tokens_and_a_left_padded_batch(stock, model, tokenizer):
    text = Path(json.__file__).read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer(text)["input_ids"][:512])
    assert len(tokens) == 512
    assert (model(tokens[None]).logits - stock(tokens[None]).logits).abs().max() <= 2e-4
    batch = tokenizer([text[:200], text[:500], text[300:420]], padding=True, padding_side="left", return_tensors="pt")
    assert (batch["attention_mask"] == 0).any()
    ours, theirs = model(**batch).logits, stock(**batch).logits
    real = batch["attention_mask"].bool()
    assert (ours - theirs)[real].abs().max() <= 2e-4


def test_it_answers(model, tokenizer):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_export_opens_as_llama_with_bit_equal_weights(stock, model, tmp_path):
    anyformer.to_hf(model, copy=False).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is LlamaForCausalLM
    expected = stock.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_a_stock_model_that_was_loaded_from_gguf_imports_too(stock, model):
    """The library leaves `quantization_config` behind, though the weights are dense by then."""
    again = anyformer.from_hf(stock)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
