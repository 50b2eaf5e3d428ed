"""The real Gemma 3 270M base, from its GGUF file: sandwich norms, two rotary bases, a window, 262,144 tokens."""

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM

import anyformer

pytestmark = pytest.mark.slow

# Logits over 262,144 tokens take one MiB a position: the texts are short.
PROMPTS = ["The three primary colours are red,", "def add(a, b):\n    return", "Water boils at"]
TEXT = """The sea was calm that morning, and the fishermen had gone out before sunrise. By noon the wind turned, the sky
grew dark over the hills, and the women of the village came down to the harbour to wait. Nobody spoke. One after the
other the boats came back, and when the last had been drawn up on the sand the rain began to fall."""


@pytest.fixture(scope="module")
def stock(gemma3_gguf):
    return AutoModelForCausalLM.from_pretrained(gemma3_gguf.parent, gguf_file=gemma3_gguf.name).eval()


@pytest.fixture(scope="module")
def model(gemma3_gguf):
    return anyformer.from_hf(gemma3_gguf)


@pytest.fixture(scope="module")
def tokenizer(gemma3_gguf):
    return AutoTokenizer.from_pretrained(gemma3_gguf.parent, gguf_file=gemma3_gguf.name, padding_side="left")


def test_norms_and_embedding_are_those_of_the_file(gemma3_gguf, model):
    """Read without transformers, since both models come through its reader. The file holds 1 + weight for norms."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gemma3_gguf).tensors}

    def read(name: str, rows: int | None = None) -> torch.Tensor:
        return torch.tensor(gguf.dequantize(tensors[name].data[:rows], tensors[name].tensor_type))

    names = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }
    ours = {name: tensor for name, tensor in model.state_dict().items() if "norm" in name}
    assert len(ours) == model.config.num_hidden_layers * len(names) + 1
    assert torch.equal(ours["model.norm.weight"], read("output_norm.weight") - 1)
    for layer in range(model.config.num_hidden_layers):
        for theirs, name in names.items():
            assert torch.equal(ours[f"model.layers.{layer}.{name}.weight"], read(f"blk.{layer}.{theirs}.weight") - 1)
    assert torch.equal(model.get_input_embeddings().weight[:1000], read("token_embd.weight", rows=1000))


@torch.no_grad()
def test_logits_within_2e_4_on_64_tokens_and_a_left_padded_batch(stock, model, tokenizer):
    """Logits reach 35. Sums in fp32 in another order, as another machine may take them, leave some 1e-5 of difference:
    the stock class differs by 4e-5 from itself when its positions are shifted by the padding.
    """
    assert type(stock) is Gemma3ForCausalLM
    tokens = torch.tensor(tokenizer(TEXT)["input_ids"][:64])
    assert len(tokens) == 64
    assert (model(tokens[None]).logits - stock(tokens[None]).logits).abs().max() <= 2e-4
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    mask = batch["attention_mask"]
    assert (mask[:, 0] == 0).any()
    # The stock class counts padding as positions; ours finds the positions by itself.
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ours, theirs = model(**batch).logits, stock(**batch, position_ids=positions).logits
    assert (ours - theirs)[mask.bool()].abs().max() <= 2e-4


@torch.no_grad()
def test_hidden_states_equal_past_the_window(stock, model, tokenizer):
    """600 tokens, so that the window of 512 cuts; without the head, whose logits would take 600 MiB a model."""
    tokens = torch.tensor(tokenizer(TEXT * 10)["input_ids"][:600])[None]
    assert model.config.sliding_window < tokens.shape[1] == 600
    ours, theirs = (m.get_decoder()(tokens).last_hidden_state for m in (model, stock))
    # Hidden states reach 70, so the difference is taken relative to that.
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_8_greedy_tokens_of_a_left_padded_batch_are_equal_and_make_sense(stock, model, tokenizer):
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    ours, theirs = (m.generate(**batch, **options) for m in (model, stock))
    assert torch.equal(ours, theirs)
    new = [tokenizer.decode(row[batch["input_ids"].shape[1] :]) for row in ours]
    assert "yellow" in new[0]
    assert "a + b" in new[1]


def test_export_returns_bit_equal_weights(stock, model):
    back = anyformer.to_hf(model, copy=False)
    assert type(back) is Gemma3ForCausalLM
    expected = stock.state_dict()
    assert back.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.state_dict().items())
