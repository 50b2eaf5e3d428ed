"""The real all-MiniLM-L6-v2, a BERT encoder, from its folder."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, BertModel

import anyformer
from anyformer.modeling.interop import import_model

# Lengths differ, so that every batch holds padding.
SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone performs music with a guitar.",
    "The central bank raised its interest rate by a quarter of a percentage point on Thursday, as had been expected.",
    "Why?",
]


@pytest.fixture(scope="module")
def stock(minilm_folder):
    return AutoModel.from_pretrained(minilm_folder).eval()


@pytest.fixture(scope="module")
def imported(minilm_folder):
    return import_model(minilm_folder)


@pytest.fixture(scope="module")
def model(imported):
    return imported[0]


@pytest.fixture(scope="module")
def tokenizer(minilm_folder):
    return AutoTokenizer.from_pretrained(minilm_folder)


# Same weights in fp32, hidden states of up to 6: only the order of additions differs.
TOLERANCE = 1e-5


@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_hidden_states_within_1e_5_on_a_padded_batch(stock, model, tokenizer, side):
    batch = tokenizer(SENTENCES, padding=True, padding_side=side, return_tensors="pt")
    mask = batch["attention_mask"]
    assert (mask[:, 0 if side == "left" else -1] == 0).any()
    # Stock BERT counts padding as positions; ours finds the positions by itself.
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    theirs = stock(**batch, position_ids=positions).last_hidden_state
    ours = model(**batch).last_hidden_state
    real = mask.bool()
    assert theirs[real].abs().max() > 1
    assert (ours - theirs)[real].abs().max() <= TOLERANCE


@torch.no_grad()
def test_hidden_states_and_pooler_within_1e_5_on_the_longest_text(stock, model, tokenizer):
    """All 512 positions: each row of the learned table is read."""
    batch = tokenizer(" ".join(SENTENCES * 20), truncation=True, max_length=512, return_tensors="pt")
    assert batch["input_ids"].shape == (1, 512)
    ours, theirs = model(**batch), stock(**batch)
    assert (ours.last_hidden_state - theirs.last_hidden_state).abs().max() <= TOLERANCE
    assert (ours.pooler_output - theirs.pooler_output).abs().max() <= TOLERANCE


@torch.no_grad()
def test_similar_sentences_are_nearer_than_a_different_one(model, tokenizer):
    batch = tokenizer(SENTENCES[:3], padding=True, padding_side="left", return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    guitar, music, bank = torch.nn.functional.normalize(mean, dim=-1)
    assert guitar @ music > 0.6
    assert guitar @ bank < 0.2
    assert music @ bank < 0.2


def test_every_weight_is_used_and_the_export_returns_it_bit_equal(minilm_folder, imported, tmp_path):
    model, report = imported
    in_file = load_file(minilm_folder / "model.safetensors")
    # A buffer of positions 0, 1, 2, ... that old files hold; it is no weight.
    weights = {name: tensor for name, tensor in in_file.items() if name != "embeddings.position_ids"}
    assert report.used == len(weights)
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in weights.values())
    anyformer.to_hf(model, copy=False).save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is BertModel
    assert again.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.state_dict().items())
