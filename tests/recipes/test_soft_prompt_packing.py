"""Each document of a packed row has the soft prompt before it: logits, loss and gradients are as of rows apart."""

import pytest
import torch
from labelled import metrics_of
from test_soft_prompt_limits import BOTH, CASES, LATENT, VIRTUAL, cases, ids, soften
from tuning import message, objective_of, trainer_of

from anyformer.recipes.errors import UserError
from anyformer.recipes.flight_checks import thorough_checks
from anyformer.recipes.run import run_recipe
from anyformer.recipes.soft_prompts import made_whole, soft_prompt_problem
from anyformer.recipes.tokens.packing import joined
from anyformer.recipes.tokens.padding import pad_rows

LENGTHS = (6, 5, 4)
ROWS = [
    {"prompt": message("user", question), "completion": message("assistant", answer)}
    for question, answer in [("one two", "three"), ("what", "the cat"), ("and the dog", "on the log"), ("two", "four")]
]
FIELDS = {
    "rope": {},
    "alibi": {"position_embedding": "alibi"},
    "relative": {"position_embedding": "relative"},
    "learned": {"position_embedding": "learned"},
    "windows": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "globals": {
        "layer_types": ["global_sliding_attention", "sliding_attention"],
        "sliding_window": 3,
        "num_global_tokens": 2,
    },
}


def documents():
    rows = [ids(n, seed=n).tolist() for n in LENGTHS]
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in rows]


def gradients(model, batches, items):
    model.zero_grad()
    loss = sum(model(**batch, num_items_in_batch=items).loss for batch in batches)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(trainer):
    """Loss and gradients of one step over the whole data set."""
    trainer._train_batch_size = len(trainer.train_dataset)
    (batch,) = trainer.get_train_dataloader()
    items = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(trainer.model, batch, num_items_in_batch=items)
    return loss, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shape", FIELDS)
@cases
def test_packed_equals_apart(tiny, case, shape):
    model = made_whole(soften(tiny(**FIELDS[shape]), case)).eval()
    one, two, three = documents()
    apart = [pad_rows([row], 0) for row in (one, two, three)]
    packed = pad_rows([joined([one, two]), joined([three])], 0)
    with torch.no_grad():
        rows = ({k: v for k, v in row.items() if k != "labels"} for row in (*apart, packed))
        *expected, got = [model(**row).logits for row in rows]
        bare = model(**{name: packed[name][:1] for name in ("input_ids", "position_ids")}).logits  # without a mask
    torch.testing.assert_close(bare, got[:1], rtol=0, atol=1e-5)
    # Behind vectors the logits of packed rows are those of the text alone; a prefix has none.
    for found, wanted in zip((got[0, :6], got[0, 6:11], got[1, :4]), expected, strict=True):
        torch.testing.assert_close(found, wanted[0, -len(found) :], rtol=0, atol=1e-5)
    items = sum(n - 2 for n in LENGTHS)
    loss, grads = gradients(model, apart, items)
    packed_loss, packed_grads = gradients(model, [packed], items)
    torch.testing.assert_close(packed_loss, loss, rtol=0, atol=1e-5)
    assert grads.keys() == packed_grads.keys() and grads
    for name, grad in grads.items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(packed_grads[name], grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", ["prompt", "mlp"])
def test_packed_equals_apart_with_latent_attention(tiny, case):
    model = made_whole(soften(tiny(**LATENT), case)).eval()
    one, two, _ = documents()
    with torch.no_grad():
        packed = pad_rows([joined([one, two])], 0)
        got = model(input_ids=packed["input_ids"], position_ids=packed["position_ids"]).logits[0]  # without a mask
        for row, found in ((one, got[:6]), (two, got[6:])):
            expected = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, VIRTUAL:]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@cases
def test_packed_pairs_of_an_encoder_decoder_are_refused(tiny, case):
    config = tiny(head="seq2seq_lm", **BOTH).config
    assert "the first pair of a packed row" in soft_prompt_problem(config, CASES[case][0], packed=True)
    assert soft_prompt_problem(tiny().config, CASES[case][0], packed=True) is None


def test_a_packed_run_learns_behind_a_soft_prompt(recipe):
    adapter = "adapter={kind: prompt-tuning, num_virtual_tokens: 4}"
    folder = run_recipe(recipe(adapter, "train.packing=true", "train.max_length=128", "train.max_steps=16"), check=True)
    metrics = metrics_of(folder)
    assert metrics["after"]["loss"] < metrics["before"]["loss"]
    assert metrics["checks"]["packed documents do not see each other"] == "passed"


@pytest.mark.parametrize("kind", ["prompt-tuning", "prefix-tuning"])
def test_a_packed_step_of_a_recipe_is_the_step_of_the_same_rows(tiny_checkpoint, tmp_path, kind):
    overrides = (f"adapter={{kind: {kind}, num_virtual_tokens: 4}}",)
    apart, packed = (
        trainer_of(objective_of("sft", tiny_checkpoint, tmp_path, *overrides, f"train.packing={value}"), ROWS)
        for value in ("false", "true")
    )
    for trainer in (apart, packed):
        made_whole(trainer.model)
    assert len(packed.train_dataset) < len(ROWS)
    packed.model.load_state_dict(apart.model.state_dict())
    (loss, grads), (packed_loss, packed_grads) = step(apart), step(packed)
    torch.testing.assert_close(packed_loss, loss, rtol=0, atol=1e-5)
    assert grads and grads.keys() == packed_grads.keys()
    for name, grad in grads.items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(packed_grads[name], grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["prompt-tuning", "prefix-tuning"])
def test_the_check_of_a_run_looks_behind_the_soft_prompt(tiny_checkpoint, tmp_path, kind):
    overrides = (f"adapter={{kind: {kind}, num_virtual_tokens: 4}}", "train.packing=true")
    trainer = trainer_of(objective_of("sft", tiny_checkpoint, tmp_path, *overrides), ROWS)
    if kind == "prompt-tuning":  # PEFT's own forward drops positions
        with pytest.raises(UserError, match="packed documents see each other"):
            thorough_checks(trainer)
    made_whole(trainer.model)
    assert thorough_checks(trainer)["packed documents do not see each other"] == "passed"
