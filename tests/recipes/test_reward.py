"""Reward models: a new head over a causal checkpoint, trained and saved with its adapter."""

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification
from tuning import LORA, PAIRS, first_batch, model_of, objective_of, trainer_of

from anyformer.recipes.adapters import merge

DROPOUT = "model.config={attention_dropout: 0.3, hidden_dropout: 0.3}"
MARGINS = [pair | {"margin": 0.5 * i} for i, pair in enumerate(PAIRS)]


@pytest.fixture
def objective(tiny_checkpoint, tmp_path):
    return lambda *overrides: objective_of("reward", tiny_checkpoint, tmp_path, *overrides)


def test_the_base_is_the_checkpoints_and_the_head_is_new(objective, tiny_checkpoint):
    from anyformer import from_hf

    model = model_of(objective())
    assert (type(model).__name__, model.config.num_labels, model.config.pad_token_id) == (
        "AnyformerForSequenceClassification",
        1,
        0,
    )
    base = from_hf(tiny_checkpoint)
    held = model.state_dict()
    for name, value in base.model.state_dict().items():
        assert torch.equal(held[f"model.{name}"], value)
    assert held["score.weight"].shape == (1, 32) and held["score.weight"].any()
    assert torch.equal(held["score.weight"], model_of(objective()).score.weight)  # from the seed


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_real_token_is_read_though_it_may_be_the_pad_token(objective, side):
    tuned = objective()
    model = model_of(tuned).eval()
    row = tuned.prepare(PAIRS).dataset[0]
    ids = row["prompt_ids"] + row["chosen_ids"] + [0]  # an end token that pads too
    alone = model(input_ids=torch.tensor([ids])).logits
    pads = [0] * 7
    padded, mask = (pads + ids, [0] * 7 + [1] * len(ids)) if side == "left" else (ids + pads, [1] * len(ids) + [0] * 7)
    with_pads = model(input_ids=torch.tensor([padded]), attention_mask=torch.tensor([mask])).logits
    hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    torch.testing.assert_close(with_pads, model.score(hidden)[None], rtol=0, atol=1e-5)
    assert (alone - with_pads).abs() > 1e-5  # without a mask the pad tokens at the end are not read


def test_batches_hold_our_ids(objective):
    tuned = objective(LORA, "train.per_device_train_batch_size=5", "train.train_sampling_strategy=sequential")
    rows, batch = tuned.prepare(MARGINS).dataset, first_batch(trainer_of(tuned, MARGINS))
    for offset, side in ((0, "chosen_ids"), (5, "rejected_ids")):
        for i, row in enumerate(rows):
            ids = row["prompt_ids"] + row[side]
            assert batch["input_ids"][offset + i, : len(ids)].tolist() == ids
            assert batch["attention_mask"][offset + i].sum() == len(ids)
    assert batch["margin"].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_the_loss_is_bradley_terrys_with_margin_and_centring(objective):
    """-log sigmoid(r_c - r_r - margin) + c (r_c + r_r)^2, with dropout off."""
    tuned = objective(DROPOUT, "train.center_rewards_coefficient=0.1", "train.train_sampling_strategy=sequential")
    trainer = trainer_of(tuned, MARGINS)
    batch = first_batch(trainer)
    model = trainer.model.train()
    loss = trainer.compute_loss(model, dict(batch))
    rewards = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    chosen, rejected = rewards.chunk(2)
    expected = -logsigmoid(chosen - rejected - batch["margin"]).mean() + 0.1 * ((chosen + rejected) ** 2).mean()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [PAIRS, MARGINS], ids=["plain", "margin"])
def test_the_measures_are_the_trainers(objective, rows):
    tuned = objective("train.per_device_eval_batch_size=5", "train.eval_strategy=epoch")
    prepared, model = tuned.prepare(rows), model_of(tuned)
    trainer = trainer_of(tuned, rows, model=model, held_out=rows)
    theirs, ours = trainer.evaluate(), tuned.measure(model, rows, prepared)
    for name in ("loss", "accuracy", "margin"):
        assert ours[name] == pytest.approx(theirs[f"eval_{name}"], abs=1e-5)
    assert ours["rows"] == 5


def test_the_head_is_trained_with_lora_and_survives_merging_and_reloading(objective, tmp_path):
    tuned = objective(LORA, "train.max_steps=30", "train.learning_rate=1e-2")
    prepared, model = tuned.prepare(PAIRS), model_of(tuned)
    head, before = model.score.weight.clone(), tuned.measure(model, PAIRS, prepared)
    trainer = trainer_of(tuned, PAIRS, model=model)
    trainer.train()
    after = tuned.measure(trainer.model, PAIRS, prepared)
    assert after["accuracy"] == 1.0 > before["accuracy"] and after["loss"] < before["loss"] - 0.2
    merged = merge(trainer.model)
    assert type(merged.score) is torch.nn.Linear and not torch.equal(merged.score.weight, head)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert torch.equal(again.score.weight, merged.score.weight)
    figures = tuned.measure(again, PAIRS, prepared)
    assert figures == pytest.approx(after, abs=1e-5) and tuned.reproduced(figures, after)
    assert not tuned.reproduced(before, after)


def test_samples_show_the_rewards(objective):
    tuned = objective("eval.samples=2")
    prepared, model = tuned.prepare(PAIRS), model_of(tuned)
    tuned.measure(model, PAIRS, prepared)
    samples = tuned.samples(model, PAIRS)
    assert len(samples) == 2
    rewards = tuned.rewards(
        model, [r["prompt_ids"] + r[s] for s in ("chosen_ids", "rejected_ids") for r in prepared.dataset]
    )
    assert samples[0].answer == f"chosen {rewards[0]:.3f}, rejected {rewards[5]:.3f}"
    assert "on the mat" in samples[0].prompt and "the dog sat on the log" in samples[0].reference


def test_mixtures_of_experts_keep_their_router_losses(objective, tiny):
    tuned = objective()
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1, "num_labels": 1}
    model = tiny(vocab_size=320, head="sequence_classification", **fields).train()
    trainer = trainer_of(tuned, PAIRS, model=model)
    batch = first_batch(trainer)
    loss = trainer.compute_loss(trainer.model, dict(batch))
    del model.forward
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    routed = model.model(**inputs, output_router_logits=True)
    aux = model.router_losses(routed.router_logits, [batch["attention_mask"]])[0]
    chosen, rejected = model(**inputs).logits[:, 0].chunk(2)
    assert aux > 0.05
    torch.testing.assert_close(loss, aux - logsigmoid(chosen - rejected).mean(), rtol=0, atol=1e-5)
