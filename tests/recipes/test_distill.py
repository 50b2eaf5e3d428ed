"""Distillation: the divergence, the rows, sampled answers, and a student that comes nearer to its teacher."""

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoTokenizer, LlamaForCausalLM
from tuning import LORA, first_batch, message, model_of, objective_of, trainer_of

from anyformer.recipes.errors import UserError
from anyformer.recipes.evaluation import held_out_loss
from anyformer.recipes.objectives.distillation import divergence

ROWS = [
    {"prompt": message("user", q), "completion": message("assistant", a)}
    for q, a in [
        ("one", "two three four"),
        ("the cat", "sat on the mat"),
        ("two", "three"),
        ("dog", "the log, the log"),
    ]
]


@pytest.fixture(scope="module")
def teacher(tiny_checkpoint, tmp_path_factory):
    """A teacher of the student's family that is surer of itself."""
    folder = tmp_path_factory.mktemp("teacher")
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        model.lm_head.weight.mul_(3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(folder)
    return folder


@pytest.fixture
def objective(tiny_checkpoint, teacher, tmp_path):
    def build(*overrides, teacher=teacher):
        return objective_of("distill", tiny_checkpoint, tmp_path, f"objective.teacher={teacher}", *overrides)

    return build


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_the_divergence_is_the_papers(beta):
    """Written with torch's own KL divergence over probabilities."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 7, 50, dtype=torch.float64) * 3
    s, t = student.softmax(-1), teacher.softmax(-1)
    m = beta * t + (1 - beta) * s

    def kl(p, q):
        return kl_div(q.log(), p, reduction="none").sum(-1)

    expected = {0.0: kl(t, s), 1.0: kl(s, t)}.get(beta, beta * kl(t, m) + (1 - beta) * kl(s, m))
    torch.testing.assert_close(divergence(student, teacher, beta), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_trained_loss_and_the_measure_are_that_divergence(objective, beta):
    tuned = objective("train.lmbda=0.0", f"train.beta={beta}", "train.per_device_train_batch_size=4")
    model = model_of(tuned)
    trainer = trainer_of(tuned, ROWS, model=model)
    batch = first_batch(trainer)
    loss = trainer.compute_loss(trainer.model.eval(), batch)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    on = batch["labels"][:, 1:] != -100
    expected = divergence(*(m(**inputs).logits[:, :-1][on] for m in (model, tuned.teacher)), beta).mean()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    prepared = tuned.prepare(ROWS)
    figures = tuned.measure(model, ROWS, prepared)
    assert figures["divergence"] == pytest.approx(loss.item(), abs=1e-5)
    plain = held_out_loss(model, prepared.dataset, pad_token_id=0, batch_size=4).as_dict()
    assert {name: figures[name] for name in plain} == pytest.approx(plain, abs=1e-5)


def test_batches_hold_our_rows_and_the_prompts_of_their_last_answers(objective):
    tuned = objective("train.per_device_train_batch_size=4", "train.train_sampling_strategy=sequential")
    talk = {"messages": ROWS[0]["prompt"] + ROWS[0]["completion"] + ROWS[1]["prompt"] + ROWS[1]["completion"]}
    rows = [talk, *({"messages": row["prompt"] + row["completion"]} for row in ROWS[1:])]
    batch, data = first_batch(trainer_of(tuned, rows)), tuned.prepare(rows).dataset
    for i, row in enumerate(rows):
        text = tuned.tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
        prompt = tuned.tokenizer(text, add_special_tokens=False)["input_ids"]
        width = batch["prompts"].shape[1]
        assert batch["prompts"][i, width - len(prompt) :].tolist() == prompt
        assert batch["prompt_attention_mask"][i].tolist() == [0] * (width - len(prompt)) + [1] * len(prompt)
        ids = data[i]["input_ids"]
        assert batch["input_ids"][i, : len(ids)].tolist() == ids
        assert batch["labels"][i, : len(ids)].tolist() == data[i]["labels"]


@pytest.mark.parametrize(
    ("lmbda", "adapter"), [(0.0, [LORA]), (1.0, [LORA]), (0.5, [])], ids=["data", "sampled", "both"]
)
def test_the_student_comes_nearer(objective, lmbda, adapter):
    rate = "1e-2" if adapter else "2e-3"
    tuned = objective(
        *adapter, f"train.lmbda={lmbda}", "train.max_new_tokens=8", "train.max_steps=25", f"train.learning_rate={rate}"
    )
    prepared, model = tuned.prepare(ROWS), model_of(tuned)
    before = tuned.measure(model, ROWS, prepared)
    kept = {name: value.clone() for name, value in tuned.teacher.state_dict().items()}
    trainer = trainer_of(tuned, ROWS, model=model)
    trainer.train()
    after = tuned.measure(trainer.model, ROWS, prepared)
    assert after["divergence"] < before["divergence"] * 0.97
    assert all(torch.equal(kept[name], value) for name, value in tuned.teacher.state_dict().items())
    assert tuned.beside() == {"teacher": sum(p.numel() for p in tuned.teacher.parameters())}


def test_a_batch_of_sampled_answers_is_weighed_by_its_own_tokens(objective):
    """The number of tokens that the trainer counted beforehand is that of the data's answers."""
    tuned = objective("train.lmbda=1.0", "train.max_new_tokens=6", "train.per_device_train_batch_size=4")
    trainer = trainer_of(tuned, ROWS)
    batch = first_batch(trainer)
    trainer.current_gradient_accumulation_steps = 1
    losses = []
    for counted in (torch.tensor(5.0), torch.tensor(5000.0)):
        torch.manual_seed(0)
        losses.append(trainer.training_step(trainer.model, dict(batch), counted).item())
    assert losses[0] == losses[1] > 0.01


def test_what_cannot_be_distilled_is_refused(objective, tiny_checkpoint, tmp_path, smollm2_gguf):
    with pytest.raises(UserError, match=r"objective\.teacher: .* has another vocabulary than the model"):
        objective(teacher=smollm2_gguf)
    with pytest.raises(UserError, match=r"train\.max_new_tokens: prompts of up to 64 tokens and 200"):
        objective("train.max_new_tokens=200")
    with pytest.raises(UserError, match=r"objective\.teacher: is missing"):
        objective_of("distill", tiny_checkpoint, tmp_path)
    for override in ("train.packing=true", "train.teacher_model_name_or_path=x", "train.lmbda=1.5"):
        with pytest.raises(UserError, match=override.partition("=")[0]):
            objective(override)
