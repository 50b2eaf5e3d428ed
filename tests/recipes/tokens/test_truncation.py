"""Rows that are longer than the limit, under every policy."""

import pytest
from small_tokenizer import build
from template_families import ANSWER, CHATML, MORE, SECOND, USER
from tuning import chat_pair, message

from anyformer.recipes.errors import UserError
from anyformer.recipes.tokens.plain_text import tokenize_documents
from anyformer.recipes.tokens.preferences import tokenize_labelled, tokenize_pairs
from anyformer.recipes.tokens.report import TokenizationReport, TokenizedData, mixed
from anyformer.recipes.tokens.supervised import tokenize_rows
from anyformer.recipes.tokens.truncation import pieces

ROWS = {
    "text": {"text": "The quick brown fox jumps over the lazy dog. " * 4},
    "prompt and completion": {"prompt": "Is the fox quick?" * 3, "completion": " The fox is quick." * 5},
    "messages": {"messages": [USER, ANSWER, MORE, SECOND, USER, ANSWER]},
}


def whole_of(tokenizer, row):
    return tokenize_rows([row], tokenizer, max_length=None).dataset[0]


@pytest.mark.parametrize("limit", [2, 3, 7, 10, 16])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_split_supervises_every_token_exactly_once(row, limit, adds_bos):
    tokenizer = build(CHATML, adds_bos=adds_bos)
    ids, labels = whole_of(tokenizer, row).values()
    data = tokenize_rows([row], tokenizer, max_length=limit, truncation="split")
    # Each piece stands in the row where its supervised tokens stand, read behind what stands before them there.
    places, start = [], 0
    for piece in data.dataset:
        tokens = piece["input_ids"]
        start = next(i for i in range(start, len(ids)) if ids[i : i + len(tokens)] == tokens and i % (limit - 1) == 0)
        assert len(tokens) <= limit
        places += [start + i for i, label in enumerate(piece["labels"]) if i and label != -100]
        assert all(label in (-100, token) for label, token in zip(piece["labels"], tokens, strict=True))
        assert start == 0 or piece["labels"][0] == -100
    assert places == [i for i, label in enumerate(labels) if i and label != -100]
    report = data.report
    assert (report.rows, report.rows_kept, report.truncated) == (1, len(data.dataset), 0)
    assert report.pieces == len(data.dataset) and report.continued == report.pieces - 1 and report.stopped == 1
    assert report.pieces + report.empty_pieces == -(-(len(ids) - 1) // (limit - 1))
    assert report.supervised_tokens == len(places) and report.tokens == sum(map(len, data.dataset["input_ids"]))


def test_pieces_without_a_supervised_token_are_left_out_and_counted():
    tokenizer = build(CHATML)
    long = {"prompt": "fox " * 30, "completion": "quick"}
    short = {"prompt": "Is the fox", "completion": " quick?"}
    data = tokenize_rows([long, short], tokenizer, max_length=8, truncation="split")
    assert (data.report.pieces, data.report.empty_pieces, data.report.rows_kept) == (1, 4, 2)
    assert (data.report.continued, data.report.stopped) == (0, 2)
    assert tokenizer.decode(data.dataset[0]["input_ids"]).endswith("quick</s>")
    # Within the limit nothing is split.
    assert data.dataset[1] == whole_of(tokenizer, short)


def test_split_invents_nothing():
    """By hand: a row of 8 tokens in pieces of 4, each from the last token of the one before."""
    ids, labels = list(range(10, 18)), [-100, -100, 12, 13, 14, -100, 16, 17]
    assert pieces(ids, labels, 4, "split", bos=10) == [
        ([10, 11, 12, 13], [-100, -100, 12, 13]),
        ([13, 14, 15, 16], [-100, 14, -100, 16]),
        ([16, 17], [-100, 17]),
    ]
    assert pieces(ids, labels, 8, "split", None) == pieces(ids, labels, None, "drop", None) == [(ids, labels)]
    assert pieces(ids, labels, 7, "drop", None) == []
    assert pieces(ids, labels, 7, "split", None)[1] == ([16, 17], [-100, 17])


def test_keep_end_keeps_the_beginning_token_where_there_is_one():
    ids, labels = list(range(10, 18)), [-100, -100, 12, 13, 14, -100, 16, 17]
    assert pieces(ids, labels, 4, "keep_end", bos=10) == [([10, 15, 16, 17], [-100, -100, 16, 17])]
    # Nothing predicts a first token.
    assert pieces(ids, labels, 4, "keep_end", bos=9) == [([14, 15, 16, 17], [-100, -100, 16, 17])]
    assert pieces(ids, labels, 4, "keep_end", bos=None) == [([14, 15, 16, 17], [-100, -100, 16, 17])]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_keep_end_keeps_the_end(row, adds_bos):
    tokenizer = build(CHATML, adds_bos=adds_bos)
    ids, labels = whole_of(tokenizer, row).values()
    data = tokenize_rows([row], tokenizer, max_length=12, truncation="keep_end")
    kept = data.dataset[0]
    bos = adds_bos and "messages" not in row  # ChatML writes none
    assert kept["input_ids"] == ids[:bos] + ids[len(ids) - 12 + bos :]
    assert kept["labels"][1:] == labels[len(labels) - 11 :]
    report = data.report
    assert (report.truncated, report.beginnings_cut, report.stopped, report.rows_kept) == (1, 1, 1, 1)
    assert report.supervised_tokens == sum(label != -100 for label in kept["labels"][1:])


# Preferences


@pytest.fixture(scope="module")
def tokenizer():
    return build("{{ bos_token }}" + CHATML)


def test_keep_end_cuts_the_prompt_of_both_sides(tokenizer):
    pair = chat_pair("the dog sat on the log " * 20, "two", "three four five six")
    (whole,) = tokenize_pairs([pair], tokenizer, max_length=500).dataset
    data, report = tokenize_pairs([pair], tokenizer, max_length=40, truncation="keep_end")
    (row,) = data
    assert row["chosen_ids"] == whole["chosen_ids"] and row["rejected_ids"] == whole["rejected_ids"]
    room = 40 - max(len(row["chosen_ids"]), len(row["rejected_ids"]))
    assert row["prompt_ids"] == [tokenizer.bos_token_id, *whole["prompt_ids"][-(room - 1) :]]
    assert row["length"] == 40
    assert (report.truncated, report.beginnings_cut, report.stopped, report.dropped) == (1, 1, 1, {})
    assert report.supervised_tokens == len(row["chosen_ids"]) + len(row["rejected_ids"])


def test_keep_end_leaves_out_what_has_no_room_for_a_prompt(tokenizer):
    long = chat_pair("one", "the dog sat on the log " * 20, "two")
    data, report = tokenize_pairs([long, chat_pair("a", "b", "c")], tokenizer, max_length=40, truncation="keep_end")
    assert len(data) == 1 and report.dropped == {"with an answer longer than max_length": 1}
    with pytest.raises(UserError, match=r"1 with an answer longer than max_length\. train\.max_length is 40"):
        tokenize_pairs([long], tokenizer, max_length=40, truncation="keep_end")


def test_keep_end_of_single_answers(tokenizer):
    row = {"prompt": message("user", "the log " * 60), "completion": message("assistant", "two"), "label": True}
    (whole,) = tokenize_labelled([row], tokenizer, max_length=500).dataset
    data, report = tokenize_labelled([row], tokenizer, max_length=40, truncation="keep_end")
    assert data[0]["completion_ids"] == whole["completion_ids"] and data[0]["length"] == 40
    assert data[0]["prompt_ids"][0] == tokenizer.bos_token_id
    assert data[0]["prompt_ids"][1:] == whole["prompt_ids"][-(39 - len(whole["completion_ids"])) :]
    assert (report.beginnings_cut, report.stopped) == (1, 1)


# Plain text without packing


@pytest.mark.parametrize("truncation", ["drop", "keep_start", "keep_end", "split"])
def test_texts_that_are_not_packed(truncation):
    tokenizer = build(adds_bos=True)
    texts = [{"text": "The fox"}, {"text": "The quick brown fox jumps over the lazy dog. " * 3}]
    options = {"packing": "none", "truncation": truncation}
    short, long = tokenize_documents(texts, tokenizer, max_length=500, packing="none").dataset["input_ids"]
    data, report = tokenize_documents(texts, tokenizer, max_length=8, **options)
    rest = data["input_ids"][1:]
    assert data["input_ids"][0] == short
    if truncation == "drop":
        assert rest == [] and report.dropped == {"longer than max_length": 1}
    elif truncation == "keep_start":
        assert rest == [long[:8]] and (report.truncated, report.stopped) == (1, 1)
    elif truncation == "keep_end":
        assert rest == [[tokenizer.bos_token_id, *long[-7:]]] and (report.truncated, report.stopped) == (1, 2)
    else:
        assert rest == [long[i : i + 8] for i in range(0, len(long) - 1, 7)]
        predicted = [label for row in data["labels"][1:] for label in row[1:]]
        assert predicted == long[1:] and all(row[0] == -100 for row in data["labels"])
        assert (report.pieces, report.continued, report.stopped) == (len(rest), len(rest) - 1, 2)


def test_pieces_of_sources_with_weights_are_those_of_an_epoch():
    from datasets import Dataset

    parts = [
        TokenizedData(
            Dataset.from_dict({"input_ids": [[1]] * rows}),
            TokenizationReport(
                rows_kept=rows,
                pieces=rows,
                continued=rows // 2,
                empty_pieces=2,
                truncated=2,
                beginnings_cut=2,
                stopped=2,
            ),
        )
        for rows in (4, 8)
    ]
    report = mixed(parts, [4, 8], [8, 4]).report  # twice the first, half of the second
    assert (report.rows_kept, report.pieces, report.continued, report.empty_pieces) == (12, 12, 6, 5)
    assert (report.truncated, report.beginnings_cut, report.stopped) == (5, 5, 5)
