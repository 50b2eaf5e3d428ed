"""Objective `token-classify`: which tokens carry a word's tag, the loss by hand, and short runs that learn."""

import random

import pytest
import torch
from kept import check_kept_rows
from labelled import SHAPES, built, first_batch, metrics_of, write_recipe
from torch.nn import functional as F
from transformers import pipeline

from anyformer.recipes.errors import UserError
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe
from anyformer.recipes.scoring.statistics import values_of

NAMES = {"Ann": "PER", "Bo Li": "PER", "Rome": "LOC", "New York": "LOC"}


def sentence(rng: random.Random) -> dict:
    """Words with BIO tags: `Ann` and `New York` among small words."""
    tokens, tags = [], []
    for part in rng.choices([*NAMES, "saw", "the", "in", "of"], k=rng.randint(3, 7)):
        words = part.split()
        tokens += words
        kind = NAMES.get(part)
        tags += [f"B-{kind}", *[f"I-{kind}"] * (len(words) - 1)] if kind else ["O"]
    return {"tokens": tokens, "tags": tags}


@pytest.fixture
def rows():
    rng = random.Random(0)
    return [sentence(rng) for _ in range(120)]


@pytest.fixture
def recipe(tmp_path, rows):
    return write_recipe(tmp_path, "token-classify", rows)


def prepared_row(recipe, tokens, tags, *overrides):
    """Tokens and targets of one row beside others."""
    prepared = prepare(recipe(*overrides))
    data = prepared.objective.prepare([{"tokens": tokens, "tags": tags}])
    words = prepared.tokenizer.convert_ids_to_tokens(data.dataset[0]["input_ids"])
    names = [None if n == -100 else prepared.config.id2label[n] for n in data.dataset[0]["labels"]]
    return words, names, data.report


def test_the_first_token_of_a_word_has_its_tag(recipe, minilm_folder):
    tokens, tags = ["Ann", "saw", "unbelievably", "(", "Rome"], ["B-PER", "O", "O", "O", "B-LOC"]
    words, names, _ = prepared_row(recipe, tokens, tags, f"model.tokenizer={minilm_folder}")
    assert words == ["[CLS]", "ann", "saw", "un", "##bel", "##ie", "##va", "##bly", "(", "rome", "[SEP]"]
    assert names == [None, "B-PER", "O", "O", None, None, None, None, "O", "B-LOC", None]


def test_bytes_of_a_word(recipe):
    _, names, _ = prepared_row(recipe, ["Bo", "é"], ["B-PER", "O"])
    assert names == ["B-PER", None, "O", None]


def test_words_beyond_the_limit_and_without_a_token_are_counted(recipe, minilm_folder):
    small = (f"model.tokenizer={minilm_folder}", "objective.max_length=4")
    words, names, report = prepared_row(recipe, ["Ann", "\u200b", "saw", "Rome"], ["B-PER", "O", "O", "B-LOC"], *small)
    assert words == ["[CLS]", "ann", "saw", "[SEP]"] and names == [None, "B-PER", "O", None]
    assert report.truncated == 1 and report.supervised_tokens == 2
    assert report.warnings == [
        "1 words lie beyond 4 tokens: they are neither trained on nor measured",
        "1 words have no token: they are neither trained on nor measured",
    ]


def test_a_tokenizer_that_knows_no_words_is_refused(recipe, monkeypatch):
    from anyformer.recipes import models

    class Slow:
        is_fast, eos_token_id, pad_token_id, bos_token_id = False, 1, 0, None

        def __len__(self):
            return 260

    monkeypatch.setattr(models, "read_tokenizer", lambda *given, **options: Slow())
    with pytest.raises(UserError, match=r"model\.tokenizer: Slow does not say which word .* a fast tokenizer"):
        prepare(recipe())


@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_the_loss_is_the_cross_entropy_of_the_first_tokens(recipe, smoothing):
    _, model, trainer = built(recipe(f"train.label_smoothing_factor={smoothing}"))
    batch, count = first_batch(trainer)
    on = batch["labels"] != -100
    assert 0 < count == on.sum() < batch["attention_mask"].sum() < on.numel()
    model.eval()
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = F.cross_entropy(logits[on], batch["labels"][on], label_smoothing=smoothing)
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=count)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)


def test_figures_by_hand(recipe):
    objective = prepare(recipe()).objective
    number = objective.numbers
    wanted = [["B-PER", "I-PER", "O"], ["B-LOC", "O"]]
    given = [["B-PER", "I-PER", "O"], ["B-PER", "O"]]
    targets = [[-100, *(number[tag] for tag in row), -100] for row in wanted]
    predicted = [[0, *(number[tag] for tag in row), 1] for row in given]
    figures = values_of(objective._by_row(predicted, targets))
    assert figures["token_accuracy"] == pytest.approx(4 / 5)
    assert figures["entity_f1"] == pytest.approx(2 * 1 / 4)
    # B-PER: 1 of 1 wanted, 2 given; I-PER and O right; B-LOC never.
    assert figures["macro_f1"] == pytest.approx((2 / 3 + 1 + 1 + 0) / 4)


def test_what_is_measured_does_not_depend_on_padding(recipe):
    prepared, model, _ = built(recipe())
    one, many = (
        prepared.objective.measure(model, prepared.splits.eval, prepared.held_out)
        for prepared.objective.recipe.eval.batch_size in (1, 16)
    )
    assert one == pytest.approx(many, abs=1e-6)
    tags = [tag for row in prepared.splits.eval for tag in row["tags"]]
    assert one["tokens"] == len(tags) and one["majority_share"] == pytest.approx(tags.count("O") / len(tags))


def test_a_held_out_tag_that_training_does_not_have(recipe, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"tokens": ["Oslo"], "tags": ["B-CITY"]}\n')
    with pytest.raises(UserError, match="the held-out words have 'B-CITY', which no training word has"):
        prepare(recipe("~data.eval_fraction", f"data.eval_source={held_out}"))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_beats_the_majority_and_opens_as_a_pipeline(tmp_path, rows, shape):
    recipe = write_recipe(tmp_path, "token-classify", rows, shape=shape)
    evaluating = ("train.eval_strategy=steps", "train.eval_steps=40", "train.per_device_eval_batch_size=4")
    folder = run_recipe(recipe("train.max_steps=80", *evaluating), check=True)
    metrics = metrics_of(folder)
    assert metrics["checks"]["accumulated gradients equal those of one batch"] == "passed"
    before, after = metrics["before"], metrics["after"]
    assert metrics["measured"]["shown"] == ["entity_f1", "token_accuracy", "loss", "majority_share"]
    assert after["token_accuracy"] > after["majority_share"] + 0.2
    # A decoder does not see what follows, so that it cannot tell `Bo` from `Bo Li` by its first byte.
    assert after["entity_f1"] > before["entity_f1"] + (0.5 if shape == "encoder" else 0.15)
    seen = [entry for entry in metrics["history"] if "eval_loss" in entry][-1]
    for name in ("token_accuracy", "entity_f1", "macro_f1"):
        assert seen[f"eval_{name}"] == pytest.approx(after[name])
    found = pipeline("token-classification", model=str(folder))("Ann saw Rome")
    assert {item["entity"] for item in found} <= {"B-PER", "I-PER", "B-LOC", "I-LOC"}
    check_kept_rows(folder)
    sample = metrics["samples_after"][0]
    assert sample["answer"].count("/") == len(sample["prompt"].split())


def test_tags_that_mark_no_spans_are_measured_by_class(tmp_path):
    rng = random.Random(1)
    rows = []
    for _ in range(80):
        words = rng.choices(["a", "cat", "ran", "is", "dog"], k=rng.randint(2, 6))
        rows.append({"tokens": words, "tags": ["noun" if w in ("cat", "dog") else "other" for w in words]})
    folder = run_recipe(write_recipe(tmp_path, "token-classify", rows)("train.max_steps=40"))
    metrics = metrics_of(folder)
    assert metrics["measured"]["shown"] == ["token_accuracy", "macro_f1", "loss", "majority_share"]
    assert metrics["after"]["macro_f1"] > metrics["before"]["macro_f1"]
    assert metrics["after"]["token_accuracy"] > metrics["after"]["majority_share"]


def test_an_adapter_trains_the_new_layer_too(recipe, tiny_checkpoint):
    base = ("~model.preset", f"model.path={tiny_checkpoint}", "model.tokenizer=null")
    lora = "adapter={kind: lora, r: 8, target_modules: all-linear}"
    metrics = metrics_of(run_recipe(recipe(*base, lora, "train.max_steps=60")))
    assert metrics["after"]["token_accuracy"] > metrics["after"]["majority_share"] + 0.1
