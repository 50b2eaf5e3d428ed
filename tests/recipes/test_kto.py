"""Desirable and undesirable answers: their order, their mismatched neighbours, their loss and measures."""

import pytest
import torch
from test_dpo import answer_log_probs, moved
from tuning import LORA, PAIRS, message, model_of, objective_of, trainer_of

from anyformer.recipes.adapters import restore_forward
from anyformer.recipes.objectives.kto import unpaired

LABELLED = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for pair in PAIRS
    for side in ("chosen", "rejected")
][:7]


@pytest.fixture
def objective(tiny_checkpoint, tmp_path):
    return lambda *overrides: objective_of("kto", tiny_checkpoint, tmp_path, *overrides)


def test_pairs_are_taken_apart_so_that_neighbours_differ_in_prompt_and_kind():
    pairs = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(9)]
    rows = unpaired(pairs, seed=0)
    expected = {(f"p{i}", f"{kind}{i}", kind == "c") for i in range(9) for kind in "cr"}
    assert {tuple(row.values()) for row in rows} == expected and len(rows) == 18
    assert [row["label"] for row in rows] == [True, False] * 9
    for first in range(0, 18, 6):
        assert len({row["prompt"] for row in rows[first : first + 6]}) == 6
    assert unpaired(pairs, seed=0) == rows != unpaired(pairs, seed=1)


def test_labelled_rows_are_shuffled_once_by_the_datas_seed():
    rows = unpaired(LABELLED, seed=0)
    assert rows != LABELLED and all(row in rows for row in LABELLED) and len(rows) == len(LABELLED)


def test_batches_hold_our_ids_and_the_neighbours_answers(objective):
    tuned = objective(LORA, "train.per_device_train_batch_size=3")
    rows = tuned.prepare(LABELLED).dataset
    trainer = trainer_of(tuned, LABELLED)
    seen = 0
    for batch in trainer.get_train_dataloader():
        here = [rows[seen + i] for i in range(len(batch["label"]))]
        seen += len(here)
        assert batch["label"].tolist() == [row["label"] for row in here]
        others = [here[-1], *here[:-1]]
        for prefix, answers in (("", here), ("KL_", others)):
            for i, (row, other) in enumerate(zip(here, answers, strict=True)):
                ids = row["prompt_ids"] + other["completion_ids"]
                assert batch[f"{prefix}input_ids"][i, : len(ids)].tolist() == ids
                assert batch[f"{prefix}attention_mask"][i].sum() == len(ids)
                mask = [0] * len(row["prompt_ids"]) + [1] * len(other["completion_ids"])
                assert batch[f"{prefix}completion_mask"][i, : len(ids)].tolist() == mask
    assert seen == len(LABELLED)


def test_the_loss_is_the_papers(objective):
    """Ethayarajh et al. 2024, eqs. 6 to 8, from plain logits; weights and a KL estimate above 0 included."""
    weights = {True: 1.5, False: 0.7}
    tuned = objective(
        "train.precompute_ref_log_probs=false", "train.desirable_weight=1.5", "train.undesirable_weight=0.7"
    )
    trainer = trainer_of(tuned, PAIRS)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
    other = {name.removeprefix("KL_"): value for name, value in batch.items() if name.startswith("KL_")}
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    for _ in range(3):  # an estimate below 0 counts as 0: make the mismatched answers likelier
        optimizer.zero_grad()
        (-answer_log_probs(trainer.model, other).mean()).backward()
        optimizer.step()
    loss = trainer.compute_loss(trainer.model.eval(), batch)
    restore_forward(trainer.model), restore_forward(trainer.ref_model)
    with torch.no_grad():
        ratios, mismatched = (
            answer_log_probs(trainer.model, part) - answer_log_probs(trainer.ref_model, part) for part in (batch, other)
        )
    point = mismatched.mean().clamp(min=0)
    assert point > 0.05
    terms = [
        weights[good.item()] * (1 - torch.sigmoid(0.1 * (ratio - point) * (1 if good else -1)))
        for ratio, good in zip(ratios, batch["label"], strict=True)
    ]
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=0, atol=1e-5)


def test_the_measures_are_the_trainers_where_its_loss_needs_no_kl_estimate(objective):
    tuned = objective(
        LORA, "train.loss_type=apo_zero_unpaired", "train.per_device_eval_batch_size=7", "train.eval_strategy=epoch"
    )
    prepared, model = tuned.prepare(LABELLED), model_of(tuned)
    before = tuned.measure(model, LABELLED, prepared)
    assert before == {"loss": 0.5, "accuracy": 0.0, "margin": 0.0, "rows": 7, "tokens": before["tokens"]}
    assert before["tokens"] == prepared.report.supervised_tokens
    trainer = moved(trainer_of(tuned, LABELLED, model=model, held_out=LABELLED))
    assert "KL_completion_ids" not in trainer.train_dataset.column_names
    theirs, after = trainer.evaluate(), tuned.measure(trainer.model, LABELLED, prepared)
    assert after["loss"] == pytest.approx(theirs["eval_loss"], abs=1e-5)
    assert after["margin"] == pytest.approx(theirs["eval_rewards/margins"], abs=1e-5)
    assert abs(after["margin"]) > 0.01 and 0 < after["accuracy"] <= 1


def test_one_kind_of_answer_is_measured_too(objective):
    tuned = objective(LORA)
    rows = [
        {"prompt": message("user", word), "completion": message("assistant", "no"), "label": False} for word in "ab"
    ]
    prepared, model = tuned.prepare(rows), model_of(tuned)
    tuned.measure(model, rows, prepared)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    figures = tuned.measure(model, rows, prepared)
    assert figures["margin"] != 0 and (figures["margin"] > 0) == (figures["accuracy"] > 0)


def test_training_moves_the_measures(objective):
    tuned = objective(LORA, "train.max_steps=30", "train.learning_rate=1e-2")
    prepared, model = tuned.prepare(PAIRS), model_of(tuned)
    tuned.measure(model, PAIRS, prepared)
    trainer = trainer_of(tuned, PAIRS, model=model)
    trainer.train()
    after = tuned.measure(trainer.model, PAIRS, prepared)
    assert after["loss"] < 0.45 and after["accuracy"] >= 0.8 and after["margin"] > 0.5
