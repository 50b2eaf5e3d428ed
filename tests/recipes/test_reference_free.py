"""Preferences without a reference: ORPO, CPO and SimPO."""

import math

import pytest
import torch
from torch.nn.functional import log_softmax, logsigmoid
from tuning import LORA, PAIRS, first_batch, model_of, objective_of, trainer_of

from anyformer.recipes.adapters import restore_forward


@pytest.fixture
def objective(tiny_checkpoint, tmp_path):
    return lambda kind, *overrides: objective_of(kind, tiny_checkpoint, tmp_path, *overrides)


def by_hand(model, batch, side):
    """Sums of log-probabilities of the answers and of the whole rows, and both counts."""
    ids, mask, labels = (batch[f"{side}_{name}"] for name in ("input_ids", "attention_mask", "labels"))
    logits = model(input_ids=ids, attention_mask=mask).logits
    scores = log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    answer, whole = (labels[:, 1:] != -100), mask[:, 1:]
    return (scores * answer).sum(1), answer.sum(1), (scores * whole).sum(1), whole.sum(1)


def expected(kind, model, batch, beta):
    chosen, rejected = (by_hand(model, batch, side) for side in ("chosen", "rejected"))
    mean = [side[0] / side[1] for side in (chosen, rejected)]
    if kind == "orpo":  # Hong et al. 2024, eqs. 4 to 7: log of odds = log p - log(1 - p)
        odds = [torch.log(torch.exp(m) / (1 - torch.exp(m))) for m in mean]
        return -chosen[2].sum() / chosen[3].sum() - beta * logsigmoid(odds[0] - odds[1]).mean()
    if kind == "simpo":  # Meng et al. 2024, eq. 6
        return -logsigmoid(beta * mean[0] - beta * mean[1] - 1.0).mean()
    # Xu et al. 2024, eq. 4
    return -logsigmoid(beta * (chosen[0] - rejected[0])).mean() - chosen[0].sum() / chosen[1].sum()


@pytest.mark.parametrize(("kind", "beta"), [("orpo", 0.1), ("simpo", 2.0), ("cpo", 0.1)])
def test_the_loss_is_the_papers_from_plain_logits(objective, tiny, kind, beta):
    tuned = objective(kind)
    model = tiny(vocab_size=320, logit_scale=0.5)
    trainer = trainer_of(tuned, PAIRS, model=model)
    batch = first_batch(trainer)
    loss = trainer.compute_loss(trainer.model, dict(batch))
    restore_forward(model)
    torch.testing.assert_close(loss, expected(kind, model, batch, beta), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["orpo", "cpo", "simpo"])
def test_batches_hold_our_ids(objective, kind):
    """TRL's own tokenising would add a second beginning and an end token by its own rules."""
    tuned = objective(kind, LORA, "train.per_device_train_batch_size=5", "train.train_sampling_strategy=sequential")
    rows, batch = tuned.prepare(PAIRS).dataset, first_batch(trainer_of(tuned, PAIRS))
    for side in ("chosen", "rejected"):
        for i, row in enumerate(rows):
            ids = row["prompt_ids"] + row[f"{side}_ids"]
            assert batch[f"{side}_input_ids"][i, : len(ids)].tolist() == ids
            assert (
                batch[f"{side}_attention_mask"][i].tolist()[: len(ids) + 1]
                == ([1] * len(ids) + [0])[: batch[f"{side}_input_ids"].shape[1]]
            )
            labels = [-100] * len(row["prompt_ids"]) + row[f"{side}_ids"]
            assert [x for x in batch[f"{side}_labels"][i].tolist() if x != -100] == row[f"{side}_ids"]
            assert batch[f"{side}_labels"][i, : len(ids)].tolist() == labels


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("orpo", []),
        ("simpo", []),
        ("simpo", ["train.alpha=0.3", "train.simpo_gamma=0.5"]),
        *(("cpo", [f"train.loss_type={loss}"]) for loss in ("sigmoid", "hinge", "ipo", "simpo", "alphapo")),
        ("cpo", ["train.label_smoothing=0.2", "train.cpo_alpha=0.3", "train.beta=0.4"]),
    ],
    ids=str,
)
def test_the_measures_are_the_trainers(objective, kind, more):
    tuned = objective(kind, *more, "train.per_device_eval_batch_size=5", "train.eval_strategy=epoch")
    prepared, model = tuned.prepare(PAIRS), model_of(tuned)
    trainer = trainer_of(tuned, PAIRS, model=model, held_out=PAIRS)
    theirs, ours = trainer.evaluate(), tuned.measure(model, PAIRS, prepared)
    assert ours["loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)
    assert ours["margin"] == pytest.approx(theirs["eval_rewards/margins"], abs=1e-5)
    assert ours["accuracy"] == pytest.approx(theirs["eval_rewards/accuracies"], abs=1e-6)
    assert (ours["rows"], ours["tokens"]) == (5, prepared.report.supervised_tokens)


@pytest.mark.parametrize("kind", ["orpo", "cpo", "simpo"])
@pytest.mark.parametrize("adapter", [[], [LORA]], ids=["full", "lora"])
def test_training_moves_the_measures(objective, kind, adapter):
    tuned = objective(kind, *adapter, "train.max_steps=30", f"train.learning_rate={'1e-2' if adapter else '2e-3'}")
    prepared, model = tuned.prepare(PAIRS), model_of(tuned)
    before = tuned.measure(model, PAIRS, prepared)
    trainer = trainer_of(tuned, PAIRS, model=model)
    trainer.train()
    after = tuned.measure(trainer.model, PAIRS, prepared)
    assert after["loss"] < before["loss"] - 0.1
    assert after["margin"] > before["margin"]
    assert after["accuracy"] >= before["accuracy"]


@pytest.mark.parametrize("kind", ["orpo", "simpo"])
def test_mixtures_of_experts_keep_their_router_losses(objective, tiny, kind):
    tuned = objective(kind)
    model = tiny(vocab_size=320, num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.1).train()
    trainer = trainer_of(tuned, PAIRS, model=model)
    batch = first_batch(trainer)
    loss = trainer.compute_loss(trainer.model, dict(batch))
    restore_forward(model)
    plain = expected(kind, model, batch, tuned.arguments.beta)
    joined = trainer.concatenated_inputs(batch, padding_value=0, device=loss.device)
    ids, mask = joined["concatenated_input_ids"], joined["concatenated_attention_mask"]
    routed = model.model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    aux = model.router_losses(routed.router_logits, [mask])[0]
    assert aux > 0.05
    torch.testing.assert_close(loss, plain + aux, rtol=0, atol=1e-5)


def test_simpo_has_its_papers_defaults(objective):
    given = objective("simpo").arguments
    assert (given.loss_type, given.cpo_alpha, given.beta, given.simpo_gamma) == ("simpo", 0.0, 2.0, 1.0)
    assert objective("simpo", "train.beta=2.5").arguments.beta == 2.5
    assert math.isclose(objective("cpo").arguments.cpo_alpha, 1.0)
