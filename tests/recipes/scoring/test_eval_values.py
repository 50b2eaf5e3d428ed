"""Figures of `anyformer eval` against others' procedures, and that batches, padding and packing leave them alone."""

import math
import re

import numpy as np
import pytest
import torch
from eval_models import LABELS, MODELS, PAIRS, TEXTS, save, values, write_rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from anyformer.recipes.errors import UserError
from anyformer.recipes.label_metrics import macro_f1, span_f1
from anyformer.recipes.scoring.answers import answers_of
from anyformer.recipes.scoring.kinds import Job, Settings
from anyformer.recipes.scoring.perplexity import windows_of
from anyformer.recipes.scoring.subject import open_subject
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer


@pytest.fixture
def folder(tiny, tmp_path):
    """A function: a folder with one of the models; the byte tokenizer pads on `side`."""

    def build(name: str, side: str = "right", **fields):
        known, head = MODELS[name]
        fields = {"vocab_size": 260, "num_key_value_heads": 4, "max_position_embeddings": 128} | known | fields
        return save(tiny(head=head, **fields), tmp_path / f"{name}-{side}", side)

    return build


@pytest.fixture
def texts(tmp_path):
    return write_rows(tmp_path / "texts.jsonl", TEXTS)


@pytest.fixture
def pairs(tmp_path):
    return write_rows(tmp_path / "pairs.jsonl", PAIRS)


def strided_by_hand(folder, max_length, stride):
    """Nats and tokens as "Perplexity of fixed-length models" has them, document by document behind a start token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    nats = count = 0.0
    for row in TEXTS:
        ids = [tokenizer.bos_token_id, *tokenizer(row["text"], add_special_tokens=False)["input_ids"]]
        encodings, seq_len, prev_end = torch.tensor([ids]), len(ids), 0
        for begin in range(0, seq_len, stride):
            end = min(begin + max_length, seq_len)
            target_len = end - prev_end
            input_ids = encodings[:, begin:end]
            target_ids = input_ids.clone()
            target_ids[:, :-target_len] = -100
            with torch.no_grad():
                loss = model(input_ids, labels=target_ids).loss
            scored = int((target_ids[:, 1:] != -100).sum())
            nats, count, prev_end = nats + loss.item() * scored, count + scored, end
            if end == seq_len:
                break
    return nats, count


@pytest.mark.parametrize(("context", "stride"), [(None, None), (32, 8), (48, 47), (16, 1)])
def test_perplexity_is_that_of_the_librarys_procedure(tiny_checkpoint, texts, context, stride):
    nats, count = strided_by_hand(tiny_checkpoint, context or 256, stride or 128)
    found = values(tiny_checkpoint, texts, settings=Settings(context=context, stride=stride, batch_size=3))
    words = sum(len(re.split(r"\s+", row["text"])) for row in TEXTS)
    size = sum(len(row["text"].encode("utf-8")) for row in TEXTS)
    assert found["perplexity per token"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert found["perplexity per word"] == pytest.approx(math.exp(nats / words), rel=1e-5)
    assert found["perplexity per byte"] == pytest.approx(math.exp(nats / size), rel=1e-5)


@pytest.mark.parametrize(("context", "stride"), [(7, 1), (7, 3), (7, 6), (40, 20)])
def test_windows_predict_each_token_once_from_enough(context, stride):
    ids = list(range(100, 133))
    windows = list(windows_of(ids, [-100, *ids[1:]], context, stride))
    scored = [label for window in windows for label in window["labels"] if label != -100]
    assert scored == ids[1:]
    for window in windows[1:]:
        first = next(place for place, label in enumerate(window["labels"]) if label != -100)
        assert first >= context - stride and len(window["input_ids"]) <= context


@pytest.mark.parametrize("name", ["rope", "alibi", "learned"])
def test_packed_and_single_texts_have_one_perplexity(folder, texts, name):
    model = folder(name)
    single, packed = (
        values(model, texts, settings=Settings(context=60, stride=20, rows=rows)) for rows in ("single", "packed")
    )
    assert single == pytest.approx(packed, rel=1e-5)


@pytest.mark.parametrize("name", ["rope", "alibi", "learned", "encoder-decoder"])
def test_perplexity_and_answers_know_nothing_of_batches_and_padding(folder, pairs, name):
    asked = []
    for side in ("left", "right"):
        model = folder(name, side)
        for size in (1, 3, 8):
            settings = Settings(batch_size=size, max_new_tokens=9)
            found = values(model, pairs, metrics=("perplexity", "exact-match", "f1"), settings=settings)
            asked.append((found["perplexity per token"], _answers(model, settings)))
    first, *others = asked
    assert any(first[1]), "it answers something"
    for perplexity, answers in others:
        assert perplexity == pytest.approx(first[0], rel=1e-5)
        assert answers == first[1]


def _answers(folder, settings):
    subject = open_subject(str(folder))
    prompts = [subject.tokenizer(row["prompt"])["input_ids"] for row in PAIRS]
    return answers_of(Job(subject, PAIRS, "prompt-completion", (), settings, lambda text: None), prompts)[0]


def test_positions_that_end_cut_the_answer_of_their_own_row_alone(folder):
    model = folder("learned", max_position_embeddings=24)
    alone, together = (_answers(model, Settings(batch_size=size, max_new_tokens=12)) for size in (1, 8))
    assert alone == together


def test_answers_are_those_of_the_model_by_itself(folder):
    model = folder("rope")
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    expected = []
    for row in PAIRS:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        for _ in range(9):
            best = plain(ids).logits[0, -1].argmax()
            if int(best) == tokenizer.eos_token_id:
                break
            ids = torch.cat([ids, best.view(1, 1)], 1)
        expected.append(tokenizer.decode(ids[0, len(tokenizer(row["prompt"])["input_ids"]) :], True).strip())
    assert _answers(model, Settings(max_new_tokens=9)) == expected


def test_targets_are_scored_given_their_sources(folder, pairs):
    model = folder("encoder-decoder")
    subject = open_subject(str(model))
    nats = count = 0
    for row in PAIRS:
        source, target = (torch.tensor([subject.tokenizer(row[name])["input_ids"]]) for name in row)
        target = torch.cat([target, torch.tensor([[subject.tokenizer.eos_token_id]])], 1)
        read = torch.cat([torch.tensor([[0]]), target[:, :-1]], 1)  # behind the start token
        with torch.no_grad():
            logits = subject.model(input_ids=source, decoder_input_ids=read).logits
        nats -= logits.log_softmax(-1).gather(-1, target[..., None]).sum().item()
        count += target.shape[1]
    found = values(model, pairs, metrics=("perplexity",))
    assert found == pytest.approx({"perplexity per token": math.exp(nats / count)}, rel=1e-5)


def test_an_answers_perplexity_is_of_its_tokens_alone(folder, pairs):
    model = folder("rope")
    subject = open_subject(str(model))
    nats = count = 0
    for row in PAIRS:
        prompt, answer = (subject.tokenizer(row[name])["input_ids"] for name in ("prompt", "completion"))
        ids = [*prompt, *answer, subject.tokenizer.eos_token_id]
        with torch.no_grad():
            logs = subject.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        nats -= sum(logs[place - 1, ids[place]].item() for place in range(len(prompt), len(ids)))
        count += len(ids) - len(prompt)
    found = values(model, pairs, metrics=("perplexity",), settings=Settings(context=128))
    assert found == pytest.approx({"perplexity per token": math.exp(nats / count)}, rel=1e-5)


@pytest.mark.parametrize("size", [1, 5])
def test_a_masked_model_hides_one_token_at_a_time(tiny_bert, tmp_path, size):
    rows = [{"text": "one two three"}, {"text": "a b c: nine?"}]
    on, model_folder = write_rows(tmp_path / "short.jsonl", rows), tmp_path / "masked"
    torch.manual_seed(3)
    config = BertConfig.from_pretrained(tiny_bert)
    config.initializer_range = 0.3
    BertForMaskedLM(config).save_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.save_pretrained(model_folder)
    model = AutoModelForMaskedLM.from_pretrained(model_folder)
    nats = count = 0
    for row in rows:
        ids = tokenizer(row["text"], return_tensors="pt")["input_ids"]
        for place in range(1, ids.shape[1] - 1):
            hidden = ids.clone()
            hidden[0, place] = tokenizer.mask_token_id
            with torch.no_grad():
                nats -= model(hidden).logits[0, place].log_softmax(-1)[ids[0, place]].item()
            count += 1
    found = values(model_folder, on, settings=Settings(batch_size=size))
    assert found["pseudo-perplexity per token"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    long = write_rows(tmp_path / "long.jsonl", [{"text": "one " * 80}])
    with pytest.raises(UserError, match=r"row 1 has 82 tokens, and the model has positions for 64"):
        values(model_folder, long)


def test_classes_know_nothing_of_batches_and_padding(folder, tmp_path):
    on = write_rows(tmp_path / "labels.jsonl", LABELS)
    found = [
        values(folder("classifier", side), on, settings=Settings(batch_size=size))
        for side in ("left", "right")
        for size in (1, 3, 8)
    ]
    subject = open_subject(str(folder("classifier")))
    given = []
    for row in LABELS:
        with torch.no_grad():
            given.append(
                int(subject.model(torch.tensor([subject.tokenizer(row["text"])["input_ids"]])).logits.argmax())
            )
    wanted = [row["label"] for row in LABELS]
    f1 = []
    for name in sorted({*wanted, *given}):
        right = sum(a == b == name for a, b in zip(wanted, given, strict=True))
        f1.append(2 * right / (wanted.count(name) + given.count(name)))
    share = sum(a == b for a, b in zip(wanted, given, strict=True)) / len(wanted)
    assert found == [{"accuracy": pytest.approx(share), "macro F1": pytest.approx(sum(f1) / len(f1))}] * 6


def logits_one_by_one(folder, rows):
    subject = open_subject(str(folder))
    with torch.no_grad():
        ids = (torch.tensor([subject.tokenizer(row["text"])["input_ids"]]) for row in rows)
        return torch.cat([subject.model(one).logits for one in ids])


def test_sets_of_labels(tiny, tmp_path):
    fields, head = MODELS["classifier"]
    problem = {"num_labels": 4, "problem_type": "multi_label_classification", "initializer_range": 0.3}
    folder = save(tiny(head=head, vocab_size=260, num_key_value_heads=4, **fields | problem), tmp_path / "sets")
    names = [f"LABEL_{at}" for at in range(4)]
    rows = [{"text": f"ab {i} " * (i % 4 + 1), "label": names[i % 3 : i % 5]} for i in range(11)]
    given = [{names[at] for at in row.nonzero()[:, 0].tolist()} for row in logits_one_by_one(folder, rows) > 0]
    wanted = [set(row["label"]) for row in rows]
    assert 0 < sum(map(len, given)) < 44
    right = sum(len(a & b) for a, b in zip(wanted, given, strict=True))
    total = sum(map(len, wanted)) + sum(map(len, given))
    by_class = [
        2 * sum(name in a & b for a, b in zip(wanted, given, strict=True)) / count
        for name in names
        if (count := sum(name in side for sides in (wanted, given) for side in sides))
    ]
    expected = {
        "accuracy of whole sets": sum(a == b for a, b in zip(wanted, given, strict=True)) / 11,
        "micro F1": 2 * right / total,
        "macro F1": sum(by_class) / len(by_class),
    }
    on = write_rows(tmp_path / "sets.jsonl", rows)
    for size in (1, 3, 8):
        assert values(folder, on, settings=Settings(batch_size=size)) == pytest.approx(expected)
    for label, said in (("LABEL_1", "its label must be a list, not 'LABEL_1'"), (["z"], "the model has no class 'z'")):
        with pytest.raises(UserError, match=f"row 1: .*{said}"):
            values(folder, write_rows(tmp_path / "bad.jsonl", [{"text": "x", "label": label}]))
    with pytest.raises(UserError, match="mae: is measured of a regressor, and the model is a multi-labeller"):
        values(folder, on, metrics=("macro-f1", "mae"))


def test_values(tiny, tmp_path):
    fields, head = MODELS["classifier"]
    problem = {"num_labels": 1, "initializer_range": 0.3}
    folder = save(tiny(head=head, vocab_size=260, num_key_value_heads=4, **fields | problem), tmp_path / "value")
    rows = [{"text": f"ab {i} " * (i % 4 + 1), "label": i / 2 - 1} for i in range(11)]
    given, wanted = logits_one_by_one(folder, rows)[:, 0].numpy(), [row["label"] for row in rows]
    errors, expected = given - wanted, {}
    expected["mean absolute error"], expected["mean squared error"] = abs(errors).mean(), (errors**2).mean()
    expected["Pearson correlation"] = np.corrcoef(given, wanted)[0, 1]
    on = write_rows(tmp_path / "values.jsonl", rows)
    for size in (1, 3, 8):
        assert values(folder, on, settings=Settings(batch_size=size)) == pytest.approx(expected, rel=1e-4)
    said = []
    still = write_rows(tmp_path / "still.jsonl", [row | {"label": 2} for row in rows])
    assert values(folder, still, tell=said.append).keys() == {"mean absolute error", "mean squared error"}
    assert "correlation: left out: the labels of the rows do not vary" in said
    for tiny_step in (1e-200, 1e-310):
        near = write_rows(tmp_path / "near.jsonl", [row | {"label": i * tiny_step} for i, row in enumerate(rows)])
        expected_there = np.corrcoef(given, range(11))[0, 1]
        assert values(folder, near)["Pearson correlation"] == pytest.approx(expected_there, rel=1e-4)
    with pytest.raises(UserError, match="no figure is left"):
        values(folder, still, metrics=("pearson",), tell=said.append)
    alike = write_rows(tmp_path / "alike.jsonl", [{"text": "same", "label": at} for at in range(5)])
    assert "Pearson correlation" not in values(folder, alike, tell=said.append)
    assert "correlation: left out: what the model gives does not vary" in said
    with pytest.raises(UserError, match=r"a label is 1e\+300 away from what the model gives"):
        values(folder, write_rows(tmp_path / "large.jsonl", [{"text": "x", "label": 1e300}]))
    pair = tiny(
        head=head, vocab_size=260, num_key_value_heads=4, **fields | {"num_labels": 2, "problem_type": "regression"}
    )
    with pytest.raises(UserError, match="gives 2 numbers for a text"):
        values(save(pair, tmp_path / "pair"), on)
    with pytest.raises(UserError, match="row 1: the model gives a number, and the label 'high' is none"):
        values(folder, write_rows(tmp_path / "bad.jsonl", [{"text": "x", "label": "high"}]))


def test_a_stock_t5_is_measured_as_it_is(tmp_path, pairs):
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, initializer_factor=3.0, decoder_start_token_id=0)).eval()
    folder, tokenizer = save(model, tmp_path / "t5"), byte_tokenizer()
    nats = count = 0
    for row in PAIRS:
        source = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        labels = torch.tensor([[*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            nats += model(input_ids=source, labels=labels).loss.item() * labels.shape[1]
        count += labels.shape[1]
    for size in (1, 3, 8):
        found = values(folder, pairs, metrics=("perplexity",), settings=Settings(batch_size=size))
        assert found == pytest.approx({"perplexity per token": math.exp(nats / count)}, rel=1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_tags_are_measured_word_by_word(tiny, tmp_path, size):
    names = ["O", "B-X", "I-X"]
    rows = [
        {"tokens": f"ab{i} c d{i * 7} e".split()[: i % 4 + 1], "tags": [names[(i + k) % 3] for k in range(i % 4 + 1)]}
        for i in range(9)
    ]
    fields = {"architecture": "encoder", "vocab_size": 260, "num_key_value_heads": 4, "num_labels": 3}
    model = tiny(head="token_classification", **fields)
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    folder = save(model, tmp_path / "tagger")
    tokenizer, wanted, given = byte_tokenizer(), [], []
    for row in rows:
        encoded = tokenizer(row["tokens"], is_split_into_words=True)
        with torch.no_grad():
            best = model(torch.tensor([encoded["input_ids"]])).logits[0].argmax(-1)
        given.append([names[best[encoded.word_ids().index(word)]] for word in range(len(row["tokens"]))])
        wanted.append(row["tags"])
    pairs = [pair for sides in zip(wanted, given, strict=True) for pair in zip(*sides, strict=True)]
    found = values(
        folder,
        write_rows(tmp_path / "tags.jsonl", rows),
        metrics=("accuracy", "macro-f1", "span-f1"),
        settings=Settings(batch_size=size),
    )
    assert found["token accuracy"] == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    assert found["macro F1"] == pytest.approx(macro_f1(wanted, given, names).value)
    assert found["span F1"] == pytest.approx(span_f1(wanted, given).value)


def test_words_and_bytes_are_lm_evaluation_harnesss(tiny_checkpoint, texts):
    harness = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm-evaluation-harness")
    from lm_eval.api.instance import Instance

    model, tokenizer = (auto.from_pretrained(tiny_checkpoint) for auto in (AutoModelForCausalLM, AutoTokenizer))
    judge = harness.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=256)
    asked = [Instance("loglikelihood_rolling", {}, (row["text"],), i) for i, row in enumerate(TEXTS)]
    nats = -sum(judge.loglikelihood_rolling(asked, disable_tqdm=True))
    words = sum(len(re.split(r"\s+", row["text"])) for row in TEXTS)
    size = sum(len(row["text"].encode()) for row in TEXTS)
    found = values(tiny_checkpoint, texts)
    assert math.log(found["perplexity per word"]) == pytest.approx(nats / words, rel=1e-5)
    assert math.log(found["perplexity per byte"]) == pytest.approx(nats / size, rel=1e-5)
