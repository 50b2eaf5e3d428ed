"""Answers with scores, and the pairs or best answers that are made of them."""

import functools

import pytest
from data_rows import SFT, rows_of, section, write_rows

from anyformer.recipes.data import load_splits
from anyformer.recipes.errors import UserError

ASK = [{"role": "user", "content": "Hi"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("Hello", "Go away"))
ROW = {"prompt": "p", "completions": ["a", "b", "c"], "scores": [1, 3.5, -2]}
PAIR = {"prompt": "p", "chosen": "b", "rejected": "c", "margin": 5.5}


@pytest.fixture
def write(tmp_path_factory):
    """Without the test's parameters in the folder's name, where the secret would be found."""
    return functools.partial(write_rows, tmp_path_factory.mktemp("scored"))


@pytest.mark.parametrize("completions", ["completions", "responses"])
@pytest.mark.parametrize("scores", ["scores", "rewards"])
def test_by_themselves_they_are_answers_with_scores(write, completions, scores):
    row = {"prompt": "p", completions: ["a", "b"], scores: [1, 2], "id": 7}
    path = write("a.jsonl", [row])
    for wanted in ("auto", "scored"):
        splits = load_splits(section(path, format=wanted))
        assert splits.train == [{"prompt": "p", "completions": ["a", "b"], "scores": [1.0, 2.0]}]
        assert (splits.report.format, splits.report.recognised) == ("scored", "scored answers")
        assert splits.report.ignored_columns == ["id"]
    assert rows_of(path, columns={"prompt": "prompt", "completions": completions, "scores": scores}) == splits.train


def test_a_row_may_hold_one_answer(write):
    path = write("a.jsonl", [{"prompt": ASK, "completion": GOOD, "score": 2}])
    splits = load_splits(section(path))
    assert splits.train == [{"prompt": ASK, "completions": [GOOD], "scores": [2.0]}]
    assert splits.report.recognised == "scored answers, an answer a row as messages"


def test_where_pairs_are_wanted_the_best_stands_against_the_worst(write):
    chat = {"prompt": ASK, "completions": [BAD, GOOD], "scores": [0, 1]}
    path = write("a.jsonl", [ROW])
    for wanted in ("auto", "preference", "scored"):
        splits = load_splits(section(path, format=wanted), accepts=["preference"])
        assert splits.train == [PAIR]
        assert splits.report.format == "preference"
        assert splits.report.recognised == "scored answers, the best against the worst"
    path = write("chat.jsonl", [chat])
    assert rows_of(path, ["preference"]) == [{"prompt": ASK, "chosen": GOOD, "rejected": BAD, "margin": 1.0}]
    # A pair that is in the row goes first.
    path = write("both.jsonl", [ROW | {"chosen": "x", "rejected": "y"}])
    assert rows_of(path, ["preference"]) == [{"prompt": "p", "chosen": "x", "rejected": "y"}]


def test_answers_in_rows_of_their_own_are_gathered_by_prompt(write):
    rows = [
        {"prompt": prompt, "completion": text, "score": score}
        for prompt, text, score in (("p", "a", 1), ("q", "x", 0), ("p", "b", 3), ("q", "y", 2), ("p", "c", 2))
    ]
    assert rows_of(write("a.jsonl", rows), ["preference"]) == [
        {"prompt": "p", "chosen": "b", "rejected": "a", "margin": 2.0},
        {"prompt": "q", "chosen": "y", "rejected": "x", "margin": 2.0},
    ]
    write("part-1.jsonl", rows[:2])
    files = write("part-2.jsonl", rows[2:]).replace("part-2", "part-*")  # one source
    assert len(rows_of(files, ["preference"])) == 2
    # The limit is one of pairs: more rows are read.
    assert rows_of(files, ["preference"], max_rows=1) == [
        {"prompt": "p", "chosen": "b", "rejected": "a", "margin": 2.0}
    ]


def test_a_stream_takes_rows_that_hold_all_answers(write):
    rows = [ROW, ROW | {"prompt": "q"}, {"prompt": "tie", "completions": ["a", "b"], "scores": [1, 1]}]
    splits = load_splits(section(write("a.jsonl", rows), streaming=True), ["preference"])
    assert list(splits.train) == [PAIR, PAIR | {"prompt": "q"}] and splits.report.left_out != {}
    single = write("b.jsonl", [{"prompt": "p", "completion": "c", "score": i} for i in range(2)])
    with pytest.raises(UserError, match=r"data\.source: answers in rows of their own .*: remove data\.streaming"):
        load_splits(section(single, streaming=True), ["preference"])


def test_what_makes_no_pair_is_left_out_and_counted(write):
    rows = [
        ROW,
        {"prompt": "tie", "completions": ["a", "b"], "scores": [1, 1]},
        {"prompt": "tie too", "completions": ["a", "b", "c"], "scores": [0, 0, 0]},
        {"prompt": "one", "completions": ["a"], "scores": [1]},
        {"prompt": "same", "completions": ["a", "a"], "scores": [1, 2]},
    ]
    report = load_splits(section(write("a.jsonl", rows)), accepts=["preference"]).report
    assert (report.rows_read, report.rows_train, report.rows_skipped) == (5, 1, 0)
    assert report.left_out == {
        "prompts whose answers all have one score": 2,
        "prompts with a single answer": 1,
        "prompts whose best and worst answer are the same": 1,
    }
    with pytest.raises(
        UserError, match=r"data\.source: no pair in .*b\.jsonl: 1 prompts whose answers all have one score"
    ):
        rows_of(write("b.jsonl", rows[1:2]), ["preference"])


def test_tuning_takes_the_best_where_that_is_asked_for(write):
    path = write("a.jsonl", [ROW])
    with pytest.raises(
        UserError,
        match=r"a\.jsonl, line 1: is scored answers, which the objective cannot use as they are; data\.format: "
        "prompt-completion takes the best answers alone",
    ):
        rows_of(path, SFT)
    splits = load_splits(section(path, format="prompt-completion"), SFT)
    assert splits.train == [{"prompt": "p", "completion": "b"}]
    assert splits.report.recognised == "the best of scored answers"
    with pytest.raises(UserError, match=r"data\.format: the objective cannot use scored, but messages"):
        rows_of(path, SFT, format="scored")
    # A score beside a single completion takes nothing away: it is named as not used.
    single = load_splits(section(write("b.jsonl", [{"prompt": "p", "completion": "c", "score": 1}])), SFT)
    assert single.train == [{"prompt": "p", "completion": "c"}] and single.report.ignored_columns == ["score"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (ROW | {"scores": [1, 2]}, "3 completions but 2 scores"),
        (ROW | {"scores": 1}, "scores must be a list, found a number"),
        (ROW | {"completions": "hunter2"}, "completions must be a list, found text"),
        (ROW | {"completions": []}, "completions is empty"),
        (ROW | {"scores": [1, 2, None]}, r"scores\[2\] must be a number, found null"),
        (ROW | {"scores": [1, True, 2]}, r"scores\[1\] must be a number, found a boolean"),
        (ROW | {"scores": [1, 1e9, 2]}, r"scores\[1\] must be a finite number of at most 1,000,000"),
        (ROW | {"completions": ["hunter2", " ", "c"]}, r"completions\[1\] is empty"),
        (ROW | {"completions": ["a", 3, "c"]}, r"completions\[1\] must be text, found a number"),
        (ROW | {"completions": ["a", GOOD, "c"]}, "prompt and completions must be all text or all lists of messages"),
        (ROW | {"prompt": ""}, "prompt is empty"),
        (ROW | {"prompt": ASK}, "prompt and completions must be all text or all lists of messages"),
        ({"prompt": "p", "responses": ["a"], "rewards": []}, "rewards is empty"),
        ({"prompt": "p", "responses": ["a"], "rewards": ["hunter2"]}, r"rewards\[0\] must be a number, found text"),
    ],
)
def test_a_bad_row_is_named_with_its_place(write, bad, reason):
    path = write("a.jsonl", [ROW, bad])
    for accepts in (None, ["preference"]):
        with pytest.raises(UserError, match=rf"a\.jsonl, line 2: {reason}") as error:
            rows_of(path, accepts)
        assert "hunter2" not in str(error.value)
        report = load_splits(section(path, on_bad_row="skip"), accepts).report
        assert (report.rows_train, report.rows_skipped) == (1, 1)
