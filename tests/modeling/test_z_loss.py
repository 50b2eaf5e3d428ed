"""The z-loss of language models (PaLM, arXiv:2204.02311, sec. 5) against a computation by hand."""

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

from anyformer import AnyformerConfig, to_hf
from anyformer.recipes.training import extended

VOCABULARY, COEFFICIENT = 101, 0.01
SHAPES = {
    "causal": {},
    "capped, tied": {"final_logit_softcapping": 4.0, "logit_scale": 0.3, "tie_word_embeddings": True},
    "seq2seq": {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1},
    "masked": {"head": "masked_lm", "architecture": "encoder", "head_transform": True, "lm_head_bias": True},
    "pretraining": {"head": "pretraining", "architecture": "encoder", "pooler": True},
}
shapes = pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)


def batch():
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(3, VOCABULARY, (2, 3, 7), generator=generator)
    labels[0, :4], labels[1] = -100, -100
    return ids, labels


def by_hand(model, ids, labels, items):
    """Loss, z-loss, of the logits of all places, written out."""
    held = copy.deepcopy(model).eval()
    held.config.z_loss_coef = 0.0
    output = held(ids, labels=labels)
    logits = output.logits if output.logits is not None else output.prediction_logits
    causal = type(model).__name__ == "AnyformerForCausalLM"
    logits, targets = (logits[:, :-1], labels[:, 1:]) if causal else (logits, labels)
    logits, targets = logits[targets != -100], targets[targets != -100]
    z = torch.log(torch.exp(logits.double()).sum(-1))
    loss = (z - logits.double().gather(1, targets[:, None])[:, 0]).sum() / items
    z_loss = (z**2).sum() / items
    (loss + COEFFICIENT * z_loss).backward()
    return loss.item(), z_loss.item(), {name: p.grad for name, p in held.named_parameters() if p.grad is not None}


@shapes
@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize("items", [None, 40])
def test_loss_and_gradients_by_hand(tiny, fields, chunk, items):
    model = tiny(vocab_size=VOCABULARY, z_loss_coef=COEFFICIENT, loss_chunk_size=chunk, **fields).train()
    ids, labels = batch()
    causal = fields.get("head") is None
    count = (labels[:, 1:] if causal else labels).ne(-100).sum().item()
    loss, z_loss, gradients = by_hand(model, ids, labels, items or count)
    output = model(ids, labels=labels, num_items_in_batch=items)
    assert output.loss.item() == pytest.approx(loss + COEFFICIENT * z_loss, rel=1e-5)
    assert output.z_loss.item() == pytest.approx(z_loss, rel=1e-5) and not output.z_loss.requires_grad
    output.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(gradients) and any(gradient.abs().max() > 1e-4 for gradient in found.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_a_head_that_is_more_than_its_weight(tiny):
    """An adapter on the head goes through the other chunked loss."""
    ids, labels = batch()
    found = []
    for chunk in (0, 2):
        torch.manual_seed(0)
        model = tiny(vocab_size=VOCABULARY, z_loss_coef=COEFFICIENT, loss_chunk_size=chunk)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)).train()
        output = adapted(input_ids=ids, labels=labels)
        output.loss.backward()
        grads = {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}
        found.append((output.loss, output.z_loss, grads))
    (loss, z_loss, grads), (chunked, chunked_z, chunked_grads) = found
    torch.testing.assert_close((chunked, chunked_z), (loss, z_loss))
    torch.testing.assert_close(chunked_grads, grads, rtol=1e-4, atol=1e-6)


@shapes
def test_held_out_losses_are_without_it(tiny, fields):
    model = tiny(vocab_size=VOCABULARY, z_loss_coef=COEFFICIENT, **fields).eval()
    ids, labels = batch()
    output = model(ids, labels=labels)
    model.config.z_loss_coef = 0.0
    assert output.z_loss is None and torch.equal(output.loss, model(ids, labels=labels).loss)


def test_a_batch_without_targets_is_zero(tiny):
    for chunk in (0, 2):
        model = tiny(vocab_size=VOCABULARY, z_loss_coef=COEFFICIENT, loss_chunk_size=chunk).train()
        output = model(batch()[0], labels=torch.full((3, 7), -100))
        output.loss.backward()
        assert output.loss == 0 and output.z_loss == 0
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_it_pulls_log_z_to_zero(tiny):
    """What it is for: without it cross-entropy leaves log(Z) where it is."""
    ids, labels = batch()
    norms = {}
    for coefficient in (0.0, 1.0):
        torch.manual_seed(0)
        model = tiny(vocab_size=VOCABULARY, z_loss_coef=coefficient).train()
        with torch.no_grad():
            model.lm_head.weight.add_(0.5 * model.lm_head.weight.sign())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            model(ids, labels=labels).loss.backward()
            optimizer.step()
        norms[coefficient] = model(ids).logits.logsumexp(-1).abs().mean().item()
    assert norms[1.0] < 0.6 * norms[0.0]


def test_the_config_refuses_what_is_no_factor():
    for wrong in (-1e-4, float("inf"), float("nan")):
        with pytest.raises((StrictDataclassError, ValueError), match="z_loss_coef"):
            AnyformerConfig(z_loss_coef=wrong)


def test_a_model_that_was_trained_with_it_is_exported(tiny):
    model = tiny(z_loss_coef=1e-4)
    stock = to_hf(model)
    ids = batch()[0]
    torch.testing.assert_close(stock(ids).logits, model.eval()(ids).logits, rtol=1e-5, atol=1e-5)


# In a trainer


def trained(model, tmp_path, **options):
    ids, labels = batch()
    labels[1, 2:5] = 7
    rows = [{"input_ids": i, "labels": t} for i, t in zip(ids.tolist() * 4, labels.tolist() * 4, strict=True)]
    values = {"max_steps": 3, "logging_steps": 1, "learning_rate": 0.1, "optim": "sgd", "seed": 1, "report_to": "none"}
    values |= {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "max_grad_norm": 0.0}
    trainer = extended(Trainer)(model, TrainingArguments(tmp_path, **values | options), train_dataset=rows)
    result = trainer.train()
    return trainer, result, [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_logs_have_the_plain_loss_and_the_z_loss_beside(tiny, tmp_path, accumulated):
    size = {"per_device_train_batch_size": 4 // accumulated, "gradient_accumulation_steps": accumulated}
    model = tiny(vocab_size=VOCABULARY, z_loss_coef=COEFFICIENT, loss_chunk_size=5)
    seen = []
    model.register_forward_hook(
        lambda module, given, output: seen.append((output.loss.item(), output.z_loss.item())), always_call=True
    )
    _, result, logs = trained(model, tmp_path, **size)
    for step, entry in enumerate(logs):
        parts = seen[step * accumulated : (step + 1) * accumulated]
        z = sum(part[1] for part in parts)
        assert entry["z_loss"] == pytest.approx(z, rel=1e-5)
        assert entry["loss"] == pytest.approx(sum(part[0] for part in parts) - COEFFICIENT * z, rel=1e-5)
    assert result.training_loss == pytest.approx(sum(entry["loss"] for entry in logs) / 3, rel=1e-6)


def test_an_interval_of_several_steps_logs_their_mean(tiny, tmp_path):
    found = []
    for steps in (1, 3):
        torch.manual_seed(0)
        model = tiny(vocab_size=VOCABULARY, z_loss_coef=COEFFICIENT)
        found.append([entry["z_loss"] for entry in trained(model, tmp_path, logging_steps=steps)[2]])
    assert found[1] == [pytest.approx(sum(found[0]) / 3, rel=1e-5)]


def test_how_a_batch_is_cut_changes_no_weight(tiny, tmp_path):
    weights = []
    for accumulated in (1, 4):
        torch.manual_seed(0)
        model = tiny(vocab_size=VOCABULARY, z_loss_coef=COEFFICIENT, loss_chunk_size=5)
        size = {"per_device_train_batch_size": 4 // accumulated, "gradient_accumulation_steps": accumulated}
        trained(model, tmp_path, **size)
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def test_without_it_nothing_is_logged(tiny, tmp_path):
    assert "z_loss" not in trained(tiny(vocab_size=VOCABULARY), tmp_path)[2][0]
