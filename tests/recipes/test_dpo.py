"""Direct preference optimisation: its reference, its loss, its measures."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import log_softmax, logsigmoid
from tuning import LORA, PAIRS, first_batch, model_of, objective_of, trainer_of

from anyformer.recipes.adapters import attach, peft_config, restore_forward
from anyformer.recipes.errors import UserError
from anyformer.recipes.objectives.preference import check_start
from anyformer.recipes.quantization import quantize
from anyformer.recipes.schema import DPO_LOSSES

DROPOUT = "model.config={attention_dropout: 0.3, hidden_dropout: 0.3, embedding_dropout: 0.3, activation_dropout: 0.3}"
LORA_DROPOUT = "adapter={kind: lora, r: 4, lora_dropout: 0.5, target_modules: all-linear}"


@pytest.fixture
def objective(tiny_checkpoint, tmp_path):
    return lambda *overrides, kind="dpo": objective_of(kind, tiny_checkpoint, tmp_path, *overrides)


def continued(model):
    """A model whose adapter has been trained before."""
    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def answer_log_probs(model, batch):
    """By hand from plain logits: the log-probability of each answer."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    scores = log_softmax(logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    return (scores * batch["completion_mask"][:, 1:]).sum(1)


def moved(trainer, seed=5):
    """Move what is trained off its start, by the same on every call."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return trainer


# The start


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize(
    ("adapter", "further"),
    [("", False), (LORA_DROPOUT, False), ("", True), ("train.precompute_ref_log_probs=false", False)],
    ids=["full", "fresh adapter", "trained adapter", "frozen copy"],
)
def test_at_step_0_the_policy_is_its_reference_under_configured_dropout(objective, kind, adapter, further):
    """DPO's loss is ln 2, KTO's 1/2, the KL divergence 0, in training mode."""
    tuned = objective(DROPOUT, *filter(None, [adapter]), kind=kind)
    model = model_of(tuned)
    model = continued(model) if further else model
    assert sum(m.p >= 0.3 for m in model.modules() if isinstance(m, torch.nn.Dropout)) >= 7
    trainer = trainer_of(tuned, PAIRS, model=model)
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(first_batch(trainer)))
    assert loss.item() == pytest.approx(math.log(2) if kind == "dpo" else 0.5, abs=1e-6)
    metrics = trainer._metrics["train"]
    names = ["rewards/chosen", "rewards/rejected"] + (["kl"] if kind == "kto" else [])
    assert [metrics[name][-1] for name in names] == pytest.approx([0.0] * len(names), abs=1e-6)
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in trainer.model.parameters())


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("bits", ["4", "8"])
def test_a_quantised_base_is_the_reference_of_its_adapter(objective, kind, bits):
    pytest.importorskip("bitsandbytes")
    tuned = objective(LORA_DROPOUT, f"model.quantization={{load_in_{bits}bit: true}}", kind=kind)
    model = quantize(model_of(tuned), tuned.recipe.model.quantization)
    model = attach(model, peft_config(tuned.recipe.adapter, tuned, model))
    trainer = trainer_of(tuned, PAIRS, model=model)  # would be stopped
    assert list(trainer.model.peft_config) == ["default"] and trainer.ref_model is None
    with pytest.raises(UserError, match="not its own reference"):
        check_start(moved(trainer))


def test_the_start_is_checked_before_training(objective):
    """Where dropout stays on, or the adapter does not leave the model as it is, there is no run."""
    wrong = objective(DROPOUT, LORA)
    wrong.arguments.disable_dropout = False
    with pytest.raises(UserError, match="not its own reference before the first step"):
        trainer_of(wrong, PAIRS)
    trainer = trainer_of(objective(LORA), PAIRS)
    check_start(trainer)
    with pytest.raises(UserError, match=r"loss is \d+\.\d+ .*init_lora_weights"):
        check_start(moved(trainer))


def test_the_check_leaves_no_trace(objective):
    tuned = objective(LORA)
    trainer = trainer_of(tuned, PAIRS)
    state, metrics = torch.get_rng_state(), dict(trainer._metrics["train"])
    check_start(trainer)
    assert torch.equal(state, torch.get_rng_state())
    assert metrics == dict(trainer._metrics["train"]) == {} and trainer._total_train_tokens == 0


# The reference


def test_no_second_copy_of_the_model_is_held(objective):
    for overrides, further in (((), False), ((LORA,), False), ((), True)):
        tuned = objective(*overrides)
        model = continued(model_of(tuned)) if further else model_of(tuned)
        size = sum(p.numel() for p in model.parameters())
        trainer = trainer_of(tuned, PAIRS, model=model)
        assert trainer.ref_model is None and tuned.beside() == {}
        fresh = sum(p.numel() for n, p in trainer.model.named_parameters() if "lora" in n) if overrides else 0
        assert sum(p.numel() for p in trainer.model.parameters()) == size + fresh
        if overrides or further:
            assert list(trainer.model.peft_config) == ["default"]


def test_a_frozen_copy_is_in_the_plan(objective):
    tuned = objective("train.precompute_ref_log_probs=false")
    parameters = model_of(tuned).num_parameters()
    assert tuned.beside() == {"reference": parameters}
    trainer = moved(trainer_of(tuned, PAIRS))
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    assert sum(p.numel() for p in trainer.ref_model.parameters()) == parameters
    assert objective("train.sync_ref_model=true").beside() == {"reference": parameters}


HEAD = "adapter={kind: lora, r: 4, target_modules: all-linear, modules_to_save: [lm_head]}"


@pytest.mark.parametrize("case", ["full", "copy", "fresh", "head", "further"])
def test_the_reference_is_the_model_as_it_was(objective, case):
    """The loss of a policy that has moved, against log-probabilities that were taken by hand before."""
    tuned = objective(
        *{"fresh": [LORA], "head": [HEAD], "copy": ["train.precompute_ref_log_probs=false"]}.get(case, [])
    )
    model = model_of(tuned)
    model = continued(model).eval() if case == "further" else model.eval()
    batch = trainer_batch(objective)
    with torch.no_grad():
        start = answer_log_probs(model, batch)
    trainer = moved(trainer_of(tuned, PAIRS[:4], model=model))
    rows = [trainer.train_dataset[i] for i in range(4)]
    loss = trainer.compute_loss(trainer.model.eval(), trainer.data_collator(rows))
    restore_forward(trainer.model)
    with torch.no_grad():
        now = answer_log_probs(trainer.model, batch)
    chosen, rejected = (now - start).chunk(2)
    assert (chosen - rejected).abs().min() > 0.01
    expected = -logsigmoid(0.1 * (chosen - rejected)).mean()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)


def trainer_batch(objective):
    trainer = trainer_of(objective(), PAIRS[:4])
    return trainer.data_collator([trainer.train_dataset[i] for i in range(4)])


@pytest.mark.parametrize("fields", [{}, {"logit_scale": 0.5}, {"final_logit_softcapping": 2.0}, {"lm_head_bias": True}])
def test_the_trainers_fused_head_is_the_models_head(objective, tiny, tiny_checkpoint, fields):
    """TRL multiplies hidden states with the head's weight by itself: the loss must be that of plain logits."""
    tuned = objective("train.precompute_ref_log_probs=false")
    model = tiny(vocab_size=320, **fields).train()
    for name, parameter in model.named_parameters():
        if name == "lm_head.bias":
            torch.nn.init.normal_(parameter)
    trainer = moved(trainer_of(tuned, PAIRS[:4], model=model))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    loss = trainer.compute_loss(trainer.model, batch)
    restore_forward(trainer.model), restore_forward(trainer.ref_model)
    with torch.no_grad():
        chosen, rejected = (answer_log_probs(trainer.model, batch) - answer_log_probs(trainer.ref_model, batch)).chunk(
            2
        )
    expected = -logsigmoid(0.1 * (chosen - rejected)).mean()
    assert abs(expected - math.log(2)) > 0.01
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)


# Losses and measures


@pytest.mark.parametrize("loss", DPO_LOSSES)
def test_every_loss_trains(objective, loss):
    smoothing = ["train.label_smoothing=0.1"] if loss in ("exo_pair", "robust") else []
    tuned = objective(LORA, f"train.loss_type={loss}", "train.max_steps=2", "train.learning_rate=1e-2", *smoothing)
    trainer = trainer_of(tuned, PAIRS)
    result = trainer.train()
    assert math.isfinite(result.training_loss)
    assert all(p.any() for n, p in trainer.model.named_parameters() if "lora_B" in n)


def test_the_measures_are_the_trainers(objective):
    """Over one batch of all held-out rows; and before training ln 2, 0 and 0."""
    tuned = objective(LORA, "train.per_device_eval_batch_size=5", "train.eval_strategy=steps", "train.eval_steps=1")
    prepared, model = tuned.prepare(PAIRS), model_of(tuned)
    before = tuned.measure(model, PAIRS, prepared)
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert before["accuracy"] == before["margin"] == 0.0
    trainer = moved(trainer_of(tuned, PAIRS, model=model, held_out=PAIRS))
    theirs = trainer.evaluate()
    after = tuned.measure(trainer.model, PAIRS, prepared)
    names = {"loss": "loss", "accuracy": "rewards/accuracies", "margin": "rewards/margins"}
    assert [after[ours] for ours in names] == pytest.approx([theirs[f"eval_{n}"] for n in names.values()], abs=1e-5)
    ratio = theirs["eval_logps/chosen"] - theirs["eval_logps/rejected"]
    assert after["log_ratio"] == pytest.approx(ratio, abs=1e-4)  # sums over answers, of about 50 nats
    assert after["tokens"] == prepared.report.supervised_tokens and after["rows"] == 5
    assert 0 < after["accuracy"] < 1 and after["loss"] != before["loss"]


def test_the_measures_do_not_depend_on_batches_and_take_the_first_model_as_start(objective):
    figures = []
    for size in (1, 3):
        tuned = objective(f"eval.batch_size={size}", LORA)
        trainer = moved(trainer_of(tuned, PAIRS, held_out=PAIRS))  # nothing was measured before
        figures.append(tuned.measure(trainer.model, PAIRS, tuned.prepare(PAIRS)))
    assert figures[0] == pytest.approx(figures[1], abs=1e-4)
    assert figures[0]["margin"] != 0


@pytest.mark.parametrize("precompute", ["true", "false"])
def test_mixtures_of_experts_keep_their_router_losses(objective, tiny, precompute):
    tuned = objective(f"train.precompute_ref_log_probs={precompute}")
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
    model = tiny(vocab_size=320, **fields).train()
    trainer = trainer_of(tuned, PAIRS[:4], model=model)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    loss = trainer.compute_loss(trainer.model, batch)
    restore_forward(model)
    routed = model.model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True
    )
    aux = model.router_losses(routed.router_logits, [batch["attention_mask"]])[0]
    assert aux > 0.05
    torch.testing.assert_close(loss, aux + math.log(2), rtol=0, atol=1e-5)


def test_rows_of_like_length_share_a_batch(objective):
    tuned = objective(LORA, "train.train_sampling_strategy=group_by_length", "train.per_device_train_batch_size=2")
    trainer = trainer_of(tuned, PAIRS)
    assert sum(batch["input_ids"].shape[0] for batch in trainer.get_train_dataloader()) == 2 * len(PAIRS)
