"""Documents packed into rows: by best fit, whole, apart, and with the gradient of rows by themselves."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled import built, metrics_of, write_recipe
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import SFTTrainer
from tuning import message, objective_of, trainer_of

from anyformer.modeling.masks import packed_lengths
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.best_fit import best_fit
from anyformer.recipes.tokens.packing import TrainingRows, joined, joiner_of_pairs, spread_over
from anyformer.recipes.tokens.padding import pad_rows

# Best fit


def bins_of(lengths, capacity):
    """The items of each row."""
    order, bounds = best_fit(np.array(lengths, dtype=np.int64), capacity)
    return [order[a:b].tolist() for a, b in pairwise(bounds)]


def by_the_book(lengths, capacity):
    """Best-fit decreasing, bin by bin: how full each ends."""
    bins = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, used in enumerate(bins) if used + length <= capacity]
        if fitting:
            bins[max(fitting, key=lambda i: bins[i])] += length
        else:
            bins.append(length)
    return sorted(bins)


def fewest(lengths, capacity):
    """The fewest bins there are, by trying all."""
    best = len(lengths)

    def place(index, bins):
        nonlocal best
        if len(bins) >= best:
            return
        if index == len(lengths):
            best = len(bins)
            return
        for i in range(len(bins)):
            if bins[i] + lengths[index] <= capacity:
                place(index + 1, [*bins[:i], bins[i] + lengths[index], *bins[i + 1 :]])
        place(index + 1, [*bins, lengths[index]])

    place(0, [])
    return best


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 90))
def test_best_fit_is_the_books(lengths, capacity):
    packs = bins_of(lengths, capacity)
    assert sorted(item for pack in packs for item in pack) == list(range(len(lengths)))
    full = [sum(lengths[item] for item in pack) for pack in packs]
    assert all(used <= capacity for used in full)
    assert sorted(full) == by_the_book(lengths, capacity)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 20), max_size=8))
def test_best_fit_is_near_the_fewest(lengths):
    assert len(bins_of(lengths, 20)) <= math.floor(11 / 9 * fewest(lengths, 20) + 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.data())
def test_bins_can_be_spread(lengths, data):
    packs = bins_of(lengths, 9)
    count = data.draw(st.integers(len(packs), len(lengths)))
    spread = spread_over(packs, count)
    assert len(spread) == count and all(spread)
    assert sorted(item for pack in spread for item in pack) == list(range(len(lengths)))
    with pytest.raises(ValueError, match="cannot fill"):
        spread_over(packs, len(lengths) + 1)


# Rows


def document(*ids):
    return {"input_ids": list(ids), "labels": [-100, *ids[1:]]}


def test_documents_are_joined_whole_and_their_first_tokens_not_predicted():
    row = joined([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, document(8, 9)])
    assert row == {
        "input_ids": [5, 6, 7, 8, 9],
        "labels": [-100, 6, 7, -100, 9],
        "position_ids": [0, 1, 2, 0, 1],
    }


def test_pairs_are_joined_on_both_sides_and_each_target_starts_anew():
    row = joiner_of_pairs(1)([{"input_ids": [5, 6], "labels": [7, 8, 2]}, {"input_ids": [9], "labels": [4, 2]}])
    assert row == {
        "input_ids": [5, 6, 9],
        "position_ids": [0, 1, 0],
        "labels": [7, 8, 2, 4, 2],
        "decoder_input_ids": [1, 7, 8, 1, 4],
        "decoder_position_ids": [0, 1, 2, 0, 1],
        "decoder_attention_mask": [1] * 5,
    }


def test_every_epoch_has_as_many_rows_and_the_documents_that_it_draws():
    rows = [document(*range(10, 10 + n)) for n in (3, 5, 2, 4, 6, 1, 2)]
    lengths = [len(row["input_ids"]) for row in rows]
    draws = {0: [0, 1, 2, 3], 1: [2, 5, 6, 0], 2: [4, 4, 1, 3]}
    packed = TrainingRows(rows, drawn=draws.__getitem__, epochs=lambda rows: 3, lengths=lengths, capacity=7)
    count = len(packed)
    assert count == max(len(bins_of([lengths[i] for i in draw], 7)) for draw in draws.values())
    for epoch, draw in draws.items():
        packed.set_epoch(epoch)
        assert len(packed) == count and sorted(row for pack in packed.packs for row in pack) == sorted(draw)
        tokens = sorted(token for i in range(count) for token in packed[i]["input_ids"])
        assert tokens == sorted(token for row in draw for token in rows[row]["input_ids"])
    single = TrainingRows(rows, drawn=draws.__getitem__, epochs=lambda rows: 3)
    single.set_epoch(2)
    assert [single[i] for i in range(len(single))] == [rows[i] for i in draws[2]]


# Training


ROWS = [
    {"prompt": message("user", question), "completion": message("assistant", answer)}
    for question, answer in [
        ("where is the cat", "on the mat"),
        ("count from two", "two three four five"),
        ("one two", "three"),
        ("and the dog", "the dog sat on the log, the log"),
        ("what", "the cat"),
        ("count from one to three", "one two three"),
    ]
]


def step(trainer):
    """Loss and gradients of one step over the whole data set."""
    trainer._train_batch_size = len(trainer.train_dataset)
    (batch,) = trainer.get_train_dataloader()
    items = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    loss = trainer.training_step(trainer.model, batch, num_items_in_batch=items)
    return loss, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}, batch


@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_a_packed_step_is_the_step_of_the_same_rows(tiny_checkpoint, tmp_path, loss_on):
    overrides = (f"objective.loss_on={loss_on}", "adapter={kind: none}")
    apart = trainer_of(objective_of("sft", tiny_checkpoint, tmp_path, *overrides), ROWS)
    packed = trainer_of(objective_of("sft", tiny_checkpoint, tmp_path, *overrides, "train.packing=true"), ROWS)
    assert len(packed.train_dataset) < len(ROWS)
    (loss, grads, _), (packed_loss, packed_grads, batch) = step(apart), step(packed)
    assert (batch["position_ids"][:, 1:] == 0).any()
    torch.testing.assert_close(packed_loss, loss, rtol=0, atol=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(packed_grads[name], grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("adapter", ["{kind: none}", "{kind: lora, r: 4, target_modules: all-linear}"])
def test_a_step_is_that_of_trls_own_loss(tiny_checkpoint, tmp_path, adapter):
    """Ours takes the head over the supervised tokens alone."""
    trainer = trainer_of(objective_of("sft", tiny_checkpoint, tmp_path, f"adapter={adapter}"), ROWS)
    loss, grads, batch = step(trainer)
    trainer.model.zero_grad()
    items = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    theirs = SFTTrainer.compute_loss(trainer, trainer.model, dict(batch), num_items_in_batch=items)
    theirs.backward()
    torch.testing.assert_close(loss, theirs.detach(), rtol=0, atol=1e-5)
    expected = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert grads.keys() == expected.keys() and grads
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_a_packed_step_of_pairs_is_the_step_of_the_same_pairs(tmp_path, smoothing):
    rows = [{"source": "abcdefgh"[: n % 7 + 1], "target": "xyz uvw"[: n % 5 + 1]} for n in range(12)]
    recipe = write_recipe(tmp_path, "seq2seq", rows, shape="encoder-decoder", hidden_dropout=0)
    common = ["data.eval_fraction=0", f"train.label_smoothing_factor={smoothing}"]
    common += ["objective.max_source_length=16", "objective.max_target_length=12"]
    _, _, apart = built(recipe(*common))
    prepared, _, packed = built(recipe(*common, "objective.packing=documents"))
    assert prepared.plan.sequences == len(packed.train_dataset) < len(rows) == len(apart.train_dataset)
    (loss, grads, _), (packed_loss, packed_grads, batch) = step(apart), step(packed)
    assert batch["input_ids"].shape[1] <= 16 and batch["labels"].shape[1] <= 12
    torch.testing.assert_close(packed_loss, loss, rtol=0, atol=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(packed_grads[name], grad, rtol=0, atol=1e-5, msg=name)


def test_a_packed_run_of_pairs_learns(tmp_path):
    rows = [{"source": f"{n} {n}", "target": str(n)} for n in range(40)]
    recipe = write_recipe(tmp_path, "seq2seq", rows, shape="encoder-decoder")
    limits = ("objective.max_source_length=24", "objective.max_target_length=16")
    folder = run_recipe(recipe("objective.packing=documents", *limits), check=True)
    metrics = metrics_of(folder)
    assert metrics["after"]["loss"] < 0.7 * metrics["before"]["loss"]
    assert metrics["checks"]["packed documents do not see each other"] == "passed"


# Variable-length attention


def test_lengths_of_packed_rows_with_padding():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    lengths = packed_lengths(documents, mask)
    assert lengths["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 7, 12] and lengths["max_length_q"] == 5
    assert lengths["cu_seq_lens_q"].dtype == torch.int32


def one_by_one(module, query, key, value, mask, *, scaling, cu_seq_lens_q=None, max_length_q=None, **kwargs):
    """What variable-length flash attention computes, in plain torch: each stretch of the batch by itself, causal."""
    assert mask is None and kwargs.get("sliding_window") == module.sliding_window
    flat = [part.transpose(1, 2).reshape(-1, *part.shape[1::2]) for part in (query, key, value)]
    bounds = cu_seq_lens_q.tolist()
    assert bounds[-1] == len(flat[0]) and max_length_q == max(b - a for a, b in pairwise(bounds))
    parts = []
    for start, end in pairwise(bounds):
        q, k, v = (part[start:end].transpose(0, 1) for part in flat)
        length = end - start
        near = torch.ones(length, length, dtype=torch.bool).tril()
        if module.sliding_window:
            near = near.triu(1 - module.sliding_window)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, near, scale=scaling, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts).view(query.shape[0], query.shape[2], *parts[0].shape[1:]), None


@pytest.fixture
def flash(monkeypatch):
    """The name of a stand-in for flash attention, with the library's own mask for it."""
    name = "flash_stand_in"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, one_by_one)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, flash_attention_mask)
    return name


@pytest.mark.parametrize("fields", [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}])
def test_flash_attention_gets_the_lengths_of_documents(tiny, flash, fields):
    """The library's mask for it drops who sees whom: without lengths, documents of a row would leak."""
    model = tiny(**fields)
    rows = [document(*range(5, 11)), document(*range(20, 24)), document(*range(30, 35))]
    batch = pad_rows([joined(rows[:2]), joined(rows[2:])], 0)
    with torch.no_grad():
        expected = model(**batch)
        model.config._attn_implementation = flash
        got = model(**batch)
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(got.logits[real], expected.logits[real], rtol=0, atol=1e-5)
        torch.testing.assert_close(got.loss, expected.loss, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match="without a prefix or an encoder"):
            prefix = tiny(**fields)(torch.tensor([[5, 6]])).cache
            model(batch["input_ids"][:1], position_ids=batch["position_ids"][:1] + 2, cache=prefix)
