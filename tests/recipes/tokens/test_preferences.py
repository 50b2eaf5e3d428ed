"""Tokens of preference rows: those that supervised tuning makes, cut at the right places."""

import pytest
from transformers import AutoTokenizer
from tuning import PAIRS, chat_pair, message

from anyformer.recipes.errors import UserError
from anyformer.recipes.tokens.preferences import tokenize_labelled, tokenize_pairs
from anyformer.recipes.tokens.supervised import tokenize_rows
from anyformer.recipes.tokens.views import RowView, answered, row_text


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


def rendered(tokenizer, *messages):
    """Ids of the conversation as the template writes it, up to its last end token."""
    text = tokenizer.apply_chat_template([m for part in messages for m in part], tokenize=False)
    return tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]


def test_conversations_are_what_the_template_writes(tokenizer):
    data, report = tokenize_pairs(PAIRS, tokenizer, max_length=64)
    for row, pair in zip(data, PAIRS, strict=True):
        prompt = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True, tokenize=False)
        assert row["prompt_ids"] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
        for side in ("chosen", "rejected"):
            assert row["prompt_ids"] + row[f"{side}_ids"] == rendered(tokenizer, pair["prompt"], pair[side])
            assert row[f"{side}_ids"][-1] == tokenizer.eos_token_id
        assert row["prompt_ids"].count(tokenizer.bos_token_id) == 2  # one a turn, none doubled
        assert row["length"] == max(len(row["prompt_ids"] + row[f"{side}_ids"]) for side in ("chosen", "rejected"))
    sides = [data["prompt_ids"][i] + data[s][i] for s in ("chosen_ids", "rejected_ids") for i in range(len(data))]
    assert report.tokens == sum(map(len, sides))
    assert report.supervised_tokens == sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in data)
    assert (report.rows, report.rows_kept, report.stopped, report.truncated) == (5, 5, 5, 0)
    assert report.longest >= max(map(len, sides))


def test_they_are_the_ids_of_supervised_tuning(tokenizer):
    rows = [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS]
    ours, theirs = (
        tokenize_pairs(PAIRS, tokenizer, max_length=64).dataset,
        tokenize_rows(rows, tokenizer, max_length=64),
    )
    for pair, row in zip(ours, theirs.dataset, strict=True):
        answer = [label for label in row["labels"] if label != -100]
        assert pair["chosen_ids"] == answer
        assert pair["prompt_ids"] + pair["chosen_ids"] == row["input_ids"][: len(pair["prompt_ids"]) + len(answer)]


def test_raw_text_gets_its_end_token(tokenizer):
    row = {"prompt": "the cat sat", "chosen": " on the mat", "rejected": " on the log"}
    data, report = tokenize_pairs([row], tokenizer, max_length=64)
    for side in ("chosen", "rejected"):
        whole = tokenizer(row["prompt"] + row[side])["input_ids"] + [tokenizer.eos_token_id]
        assert data[0]["prompt_ids"] + data[0][f"{side}_ids"] == whole
    assert tokenizer.decode(data[0]["prompt_ids"]) == "the cat sat"
    assert report.merged == 0


def test_a_token_over_the_boundary_that_differs_between_the_sides_belongs_to_the_answers(tokenizer):
    """ " mat" is one token: of "ma" + "t" the prompt's last characters are part of it, of "ma" + "n" they are not."""
    row = {"prompt": "on the ma", "chosen": "t, the dog", "rejected": "n, the dog"}
    data, report = tokenize_pairs([row], tokenizer, max_length=64)
    chosen, rejected = (data[0]["prompt_ids"] + data[0][f"{side}_ids"] for side in ("chosen", "rejected"))
    assert chosen == tokenizer("on the mat, the dog")["input_ids"] + [tokenizer.eos_token_id]
    assert rejected == tokenizer("on the man, the dog")["input_ids"] + [tokenizer.eos_token_id]
    shared = next(i for i in range(len(chosen)) if chosen[i] != rejected[i])
    assert len(data[0]["prompt_ids"]) == shared
    assert report.merged == 1


def test_turns_that_both_sides_share_move_into_the_prompt(tokenizer):
    opening = message("user", "one") + message("assistant", "two")
    row = {
        "prompt": opening[:1],
        "chosen": opening[1:] + message("user", "and") + message("assistant", "three"),
        "rejected": opening[1:] + message("user", "and") + message("assistant", "five"),
    }
    plain = chat_pair("and", "three", "five") | {"prompt": opening + message("user", "and")}
    moved, expected = (tokenize_pairs([r], tokenizer, max_length=64).dataset[0] for r in (row, plain))
    assert moved == expected
    row["rejected"] = message("assistant", "no") + message("user", "and") + message("assistant", "five")
    with pytest.raises(UserError, match="Row 1: chosen holds 3 messages"):
        tokenize_pairs([row], tokenizer, max_length=64)


def test_long_pairs_are_dropped_or_cut_and_counted(tokenizer):
    long = chat_pair("one", "two", "the dog sat on the log " * 20)
    data, report = tokenize_pairs([PAIRS[0], long], tokenizer, max_length=40)
    assert len(data) == 1 and report.dropped == {"longer than max_length": 1}
    data, report = tokenize_pairs([PAIRS[0], long], tokenizer, max_length=40, truncation="keep_start")
    assert (len(data), report.truncated, report.stopped, report.dropped) == (2, 1, 1, {})
    assert len(data[1]["prompt_ids"] + data[1]["rejected_ids"]) == 40
    assert data[1]["chosen_ids"][-1] == tokenizer.eos_token_id  # only the side that is too long is cut


def test_a_pair_without_a_difference_left_is_dropped(tokenizer):
    same = chat_pair("one", "two", "two")
    cut = chat_pair("one", "the dog sat on the log one", "the dog sat on the log two")
    buried = chat_pair("the dog sat on the log " * 20, "one", "two")
    start = len(tokenize_pairs([cut], tokenizer, max_length=64).dataset[0]["prompt_ids"])
    kept = {"max_length": start + 3, "truncation": "keep_start"}
    report = tokenize_pairs([same, cut, buried, chat_pair("one", "two", "five")], tokenizer, **kept).report
    assert report.dropped == {"chosen and rejected are equal": 2, "no answer within max_length": 1}
    assert report.rows_kept == 1
    with pytest.raises(
        UserError, match=r"None of the 1 rows is left: 1 longer than max_length\. train\.max_length is 9"
    ):
        tokenize_pairs([cut], tokenizer, max_length=9)


def test_margins_come_along_and_default_to_none_required(tokenizer):
    data = tokenize_pairs([PAIRS[0] | {"margin": 2}, PAIRS[1]], tokenizer, max_length=64).dataset
    assert data["margin"][:] == [2.0, 0.0]
    assert "margin" not in tokenize_pairs(PAIRS, tokenizer, max_length=64).dataset.column_names


def test_labelled_answers(tokenizer):
    rows = [
        {"prompt": message("user", "one"), "completion": message("assistant", "two"), "label": True},
        {"prompt": message("user", "one"), "completion": message("assistant", "the log " * 40), "label": False},
    ]
    data, report = tokenize_labelled(rows, tokenizer, max_length=40, truncation="keep_start")
    assert data["label"][:] == [True, False]
    assert data[0]["prompt_ids"] + data[0]["completion_ids"] == rendered(
        tokenizer, rows[0]["prompt"], rows[0]["completion"]
    )
    assert (report.truncated, report.stopped) == (1, 1)
    assert report.supervised_tokens == sum(map(len, data["completion_ids"][:]))
    assert report.tokens == sum(data["length"][:])
    data, report = tokenize_labelled(rows, tokenizer, max_length=40)
    assert report.dropped == {"longer than max_length": 1} and len(data) == 1


def test_a_preview_marks_the_answer(tokenizer):
    row = tokenize_pairs(PAIRS[:1], tokenizer, max_length=64).dataset[0]
    sequence = answered(row["prompt_ids"], row["chosen_ids"])
    assert row_text(RowView((sequence,)), tokenizer) == (
        "<|im_start|>user\nwhere is the cat<|im_end|>\n<|im_start|>assistant\n⟦on the mat<|im_end|>⟧"
    )
