"""Documents in shards as rows: the same as of texts, and which of them are held out."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from trl import pack_dataset

from anyformer.recipes.data import load_splits
from anyformer.recipes.errors import UserError
from anyformer.recipes.schema.sections import DataSection
from anyformer.recipes.shards.selection import TokenDocuments, everything, hold_out
from anyformer.recipes.tokens.best_fit import best_fit
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer
from anyformer.recipes.tokens.plain_text import tokenize_documents

RNG = np.random.default_rng(1)
TEXTS = ["".join(RNG.choice(list("abc de"), RNG.integers(1, 40))).strip() or "x" for _ in range(150)]
TEXTS += ["y" * 200, "z" * 63, "z" * 64, "z" * 65]


@pytest.fixture
def shards(shards_of):
    return shards_of(TEXTS, by=byte_tokenizer(), shard_tokens=500)


def plain(rows):
    return [{name: np.asarray(values).tolist() for name, values in rows[i].items()} for i in range(len(rows))]


def section(**fields):
    return DataSection(**{"eval_fraction": 0.2} | fields)


# Rows


@pytest.mark.parametrize("size", [2, 7, 64, 100_000])
@pytest.mark.parametrize(
    ("packing", "truncation"), [("blocks", "drop"), ("documents", "drop"), ("none", "drop"), ("none", "keep_start")]
)
@pytest.mark.parametrize("part", ["all", "some"])
def test_rows_are_those_of_the_texts(shards, size, packing, truncation, part):
    """What a run on the texts themselves would have, row by row, and the same report."""
    documents = everything(shards) if part == "all" else hold_out(shards, 0.3, 5)[0]
    texts = [{"text": TEXTS[documents.number(i)]} for i in range(len(documents))]
    assert [documents[i] for i in range(len(documents))] == texts
    options = {"max_length": size, "packing": packing, "truncation": truncation}
    expected = tokenize_documents(texts, byte_tokenizer(), **options)
    found = documents.prepared(**options)
    assert plain(found.dataset) == plain(expected.dataset)
    assert [found.dataset.length(i) for i in range(len(found.dataset))] == list(map(len, expected.dataset["input_ids"]))
    report, wanted = vars(found.report), vars(expected.report)
    if packing == "blocks":  # the longest document is not looked for
        report, wanted = report | {"longest": 0}, wanted | {"longest": 0}
    assert report == wanted


def test_a_last_block_of_one_token_is_left_out(shards_of):
    documents = everything(shards_of(["abcd"], by=byte_tokenizer()))
    found = documents.prepared(max_length=4, packing="blocks", truncation="drop")
    expected = tokenize_documents([{"text": "abcd"}], byte_tokenizer(), max_length=4, packing="blocks")
    assert plain(found.dataset) == plain(expected.dataset) and found.report.dropped == {"nothing to predict": 1}
    assert (found.report.tokens, found.report.supervised_tokens) == (4, 3)
    assert expected.report.supervised_tokens == 3 and expected.report.tokens == 4


def test_nothing_left_names_count_cause_and_setting(shards):
    with pytest.raises(
        UserError, match=r"None of the 3 documents.*3 longer than max_length. objective.max_length is 2"
    ):
        first = TokenDocuments(shards, np.array([150]), np.array([153]))
        first.prepared(max_length=2, packing="none", truncation="drop")


def test_a_truncation_that_shards_do_not_know_is_refused(shards):
    with pytest.raises(UserError, match=r"data\.truncation: keep_middle is not possible for token shards"):
        everything(shards).prepared(max_length=64, packing="none", truncation="keep_middle")


def test_rows_are_read_when_they_are_asked_for(shards, monkeypatch):
    reads = []
    read = type(shards).read
    monkeypatch.setattr(type(shards), "read", lambda self, *at: reads.append(at) or read(self, *at))
    for packing in ("blocks", "documents", "none"):
        rows = everything(shards).prepared(max_length=32, packing=packing, truncation="keep_start").dataset
        assert reads == []
        assert len(rows[3]["input_ids"]) == sum(count for _, count in reads) == rows.length(3) <= 32
        assert plain([rows[-1]]) == plain([rows[len(rows) - 1]])
        with pytest.raises(IndexError):
            rows[len(rows)]
        reads.clear()


def test_rows_go_to_the_workers_of_a_loader(shards):
    rows = everything(shards).prepared(max_length=32, packing="documents", truncation="drop").dataset
    rows[0]
    assert len(pickle.dumps(rows)) < 20_000  # no file travels
    loader = DataLoader(rows, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert plain(list(loader)) == plain(rows)


# Packing


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 24).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), min_size=1, max_size=60)))
)
def test_best_fit_is_that_of_trl(case):
    size, lengths = case
    whole = Dataset.from_dict({"input_ids": [[i] * length for i, length in enumerate(lengths)]})
    options = {"batch_size": len(lengths), "keep_in_memory": True}
    expected = [
        list(dict.fromkeys(row["input_ids"]))
        for row in pack_dataset(whole, seq_length=size, strategy="bfd_split", map_kwargs=options)
    ]
    order, bounds = best_fit(np.array(lengths), size)
    assert [order[a:b].tolist() for a, b in pairwise(bounds)] == expected


# Sides


def numbers(documents):
    return [documents.number(i) for i in range(len(documents))]


def test_sides_are_whole_and_depend_on_number_and_seed_alone(shards_of):
    texts = [str(i) for i in range(3000)]
    shards = shards_of(texts, by=byte_tokenizer(), shard_tokens=2000)
    train, held = map(numbers, hold_out(shards, 0.1, 3))
    assert sorted(train + held) == list(range(3000)) and train == sorted(train) and held == sorted(held)
    assert abs(len(held) - 300) < 5 * (3000 * 0.1 * 0.9) ** 0.5  # five standard deviations
    assert set(numbers(hold_out(shards, 0.05, 3)[1])) < set(held)
    assert held != numbers(hold_out(shards, 0.1, 4)[1])
    fewer = shards_of(texts[:1000], "fewer", by=byte_tokenizer())
    assert numbers(hold_out(fewer, 0.1, 3)[1]) == [n for n in held if n < 1000]
    # Neighbours go their own ways.
    both = sum(a + 1 == b for a, b in pairwise(held))
    assert abs(both - 30) < 5 * 30**0.5


def test_max_rows_takes_the_first_documents_and_stops_there(shards):
    whole, whole_held = map(numbers, hold_out(shards, 0.2, 1))
    train, held = map(numbers, hold_out(shards, 0.2, 1, max_rows=20))
    assert train == whole[:20] and held == [n for n in whole_held if n < whole[19]]
    assert numbers(hold_out(shards, 0.0, 1, max_rows=3)[0]) == [0, 1, 2]
    assert numbers(hold_out(shards, 0.2, 1, max_rows=10_000)[0]) == whole


def test_the_sections_settings_count_documents(shards):
    splits = load_splits(section(source=str(shards.folder), max_rows=30, max_eval_rows=2), ("text", "tokens"))
    assert len(splits.train) == 30 == splits.report.rows_train and len(splits.eval) == 2 == splits.report.rows_eval
    report = splits.report
    assert (report.format, report.recognised, report.sources) == ("tokens", "token shards", [str(shards.folder)])
    assert report.rows_read == len(TEXTS) and "whole documents, about 0.2 of them" in report.split
    drawn = hold_out(shards, 0.2, 0, max_rows=30)[1]
    assert set(numbers(splits.eval)) < set(numbers(drawn))


def test_held_out_documents_may_lie_in_a_folder_of_their_own(shards, shards_of):
    other = shards_of(["held", "out"], "other", by=byte_tokenizer())
    splits = load_splits(section(source=[str(shards.folder)], eval_source=str(other.folder), max_rows=5))
    assert numbers(splits.train) == list(range(5)) and list(splits.eval) == [{"text": "held"}, {"text": "out"}]
    assert splits.report.eval_sources == [str(other.folder)]
    nothing = load_splits(section(source=str(shards.folder), eval_fraction=0.0))
    assert len(nothing.train) == len(TEXTS) and not nothing.eval


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": "text"}, r"data\.format: .*shards is tokens, not text: remove the key"),
        ({"columns": {"text": "body"}}, r"data\.columns: token shards have no columns"),
        ({"source": ["SHARDS", "OTHER"]}, "cannot stand in a list with others: tokenise all sources into one folder"),
        ({"source": {"path": "SHARDS", "weight": 2}}, r"data\.source: a folder of token shards has no weight"),
        ({"streaming": True}, r"data\.streaming: token shards are read from disk in any case"),
        ({"eval_source": "SHARDS"}, r"data\.eval_source: .*shards is named in data\.source too"),
        ({"eval_source": "OTHER"}, r"data\.eval_source: .*other was made with another tokenizer \(fingerprint"),
        ({"eval_source": "TEXTS"}, r"data\.eval_source: .*texts\.jsonl is no folder of token shards"),
        ({"source": "TEXTS", "eval_source": "SHARDS"}, r"data\.source: .*texts\.jsonl is no folder of token shards"),
        ({"source": "TEXTS", "format": "tokens"}, r"data\.source: .*texts\.jsonl is no folder of token shards"),
        ({"eval_fraction": 1e-9}, r"leaves 154 documents to train on and 0 held out"),
    ],
)
def test_what_does_not_go_together_is_refused(shards, shards_of, texts_of, tokenizer, fields, said):
    other = shards_of(["one"], "other", by=tokenizer)
    names = {"SHARDS": str(shards.folder), "OTHER": str(other.folder), "TEXTS": str(texts_of(["a", "b"]))}
    fields = {key: names.get(value, value) if isinstance(value, str) else value for key, value in fields.items()}
    fields = {k: [names[n] for n in v] if isinstance(v, list) else v for k, v in fields.items()}
    fields = {
        k: v | {"path": names[v["path"]]} if isinstance(v, dict) and "path" in v else v for k, v in fields.items()
    }
    with pytest.raises(UserError, match=said):
        load_splits(section(**{"source": str(shards.folder)} | fields))


def test_other_objectives_do_not_read_shards(shards):
    with pytest.raises(UserError, match=r"holds token shards, which the objective pretrain alone reads"):
        load_splits(section(source=str(shards.folder)), ("text", "classification"))
