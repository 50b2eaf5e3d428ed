"""What each form of row becomes, and what each may not be."""

import functools
import json

import pytest
from data_rows import CHAT, SECRET, SFT, pairs, rows_of, section, write_rows

from anyformer.recipes.data import load_splits
from anyformer.recipes.data.formats import FORMATS
from anyformer.recipes.errors import UserError


@pytest.fixture
def tmp_path(tmp_path_factory):
    """Without the test's parameters in its name, where the secret would be found."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def write(tmp_path):
    return functools.partial(write_rows, tmp_path)


def test_formats_are_recognised_and_named(write):
    alpaca = [
        {"instruction": "Add", "input": "1 2", "output": "3", "text": "ignored", "system": "Be brief."},
        {"instruction": "Greet", "input": "", "output": "Hi"},
    ]
    splits = load_splits(section(write("alpaca.jsonl", alpaca)))
    assert splits.train == [
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add\n\n1 2"}],
            "completion": [{"role": "assistant", "content": "3"}],
        },
        {
            "prompt": [{"role": "user", "content": "Greet"}],
            "completion": [{"role": "assistant", "content": "Hi"}],
        },
    ]
    assert splits.report.format == "prompt-completion"
    assert splits.report.recognised.startswith("Alpaca")
    assert splits.report.ignored_columns == ["text"]

    sharegpt = [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "id": 1}]
    splits = load_splits(section(write("share.jsonl", sharegpt)))
    assert splits.train == [{"messages": CHAT}]
    assert splits.report.format == "messages" and splits.report.recognised.startswith("ShareGPT")

    with pytest.raises(UserError, match=r"conversations\[1\]\.from must be system, user, assistant or tool"):
        rows_of(write("tool.jsonl", [{"conversations": [*sharegpt[0]["conversations"][:1], {"from": "narrator"}]}]))

    splits = load_splits(section(write("m.jsonl", [{"messages": [{**m, "name": "x"} for m in CHAT], "prompt": "Hi"}])))
    assert splits.train == [{"messages": CHAT}] and splits.report.ignored_columns == ["messages.name", "prompt"]

    chat = [{"prompt": CHAT[:1], "completion": CHAT[1:]}]
    splits = load_splits(section(write("pc.jsonl", chat)))
    assert splits.train == chat and splits.report.recognised == "prompt and completion as messages"
    assert load_splits(section(write("p.jsonl", pairs(1)))).report.recognised == "prompt and completion"


def test_format_setting_decides_between_forms_that_fit(write):
    path = write("a.jsonl", [{"prompt": "p", "completion": "c", "text": "t"}])
    assert rows_of(path) == [{"prompt": "p", "completion": "c"}]
    assert rows_of(path, format="text") == [{"text": "t"}]
    expected = r"line 1: does not fit data\.format messages: .*expected messages; or conversations"
    with pytest.raises(UserError, match=expected):
        rows_of(path, format="messages")


def test_columns(write):
    path = write("a.jsonl", [{"question": "q", "answer": "a", "messages": CHAT, "text": "t"}])
    mapping = {"prompt": "question", "completion": "answer"}
    assert rows_of(path, columns=mapping) == [{"prompt": "q", "completion": "a"}]  # before what would fit unasked
    assert rows_of(path, columns={"text": "answer"}) == [{"text": "a"}]
    with pytest.raises(
        UserError, match=r"line 1: has no column 'quest' \(data\.columns\.prompt\): found question, answer"
    ):
        rows_of(path, columns={"prompt": "quest", "completion": "answer"})
    with pytest.raises(UserError, match=r"data\.columns: unknown name promt\. Known: chosen, .*prompt"):
        rows_of(path, columns={"promt": "question"})


def test_mixed_formats_are_an_error_even_when_skipping(write):
    mixed = [*pairs(1), {"text": "t"}]
    message = r"b\.jsonl, line 2: this row is text, but .*b\.jsonl, line 1 is prompt and completion"
    for on_bad_row in ("error", "skip"):
        with pytest.raises(UserError, match=message):
            rows_of(write("b.jsonl", mixed), on_bad_row=on_bad_row)
    with pytest.raises(UserError, match="this row is prompt and completion as messages, but"):
        rows_of(write("b.jsonl", [*pairs(1), {"prompt": CHAT[:1], "completion": CHAT[1:]}]))
    with pytest.raises(UserError, match="this row is text"):
        rows_of([write("a.jsonl", pairs(1)), write("c.txt", "text")])


SYSTEM = {"role": "system", "content": "Be brief."}
ASK, ANSWER, WORSE = CHAT[:1], CHAT[1:], [{"role": "assistant", "content": "Go away"}]


@pytest.mark.parametrize(
    ("row", "format_name", "recognised", "out"),
    [
        (
            {"prompt": "p", "chosen": "c", "rejected": "r", "messages": CHAT, "score": 1},
            "preference",
            "preference pairs",
            {"prompt": "p", "chosen": "c", "rejected": "r"},
        ),
        (
            {"prompt": ASK, "chosen": ANSWER, "rejected": WORSE},
            "preference",
            "preference pairs as messages",
            {"prompt": ASK, "chosen": ANSWER, "rejected": WORSE},
        ),
        (  # as published sets often have it: the prompt again in front of the answers
            {"prompt": ASK, "chosen": ASK + ANSWER, "rejected": ASK + WORSE},
            "preference",
            "preference pairs as messages",
            {"prompt": ASK, "chosen": ANSWER, "rejected": WORSE},
        ),
        (
            {"prompt": "Hi", "chosen": ASK + ANSWER, "rejected": ASK + WORSE},
            "preference",
            "preference pairs as messages",
            {"prompt": ASK, "chosen": ANSWER, "rejected": WORSE},
        ),
        (
            {"chosen": [*CHAT, *ASK, *ANSWER], "rejected": [*CHAT, *ASK, *WORSE]},
            "preference",
            "preference pairs, their shared messages taken as the prompt",
            {"prompt": [*CHAT, *ASK], "chosen": ANSWER, "rejected": WORSE},
        ),
        (  # an answer that both share is no part of the prompt where no question follows
            {"chosen": CHAT, "rejected": [*CHAT, *ASK, *WORSE]},
            "preference",
            "preference pairs, their shared messages taken as the prompt",
            {"prompt": ASK, "chosen": ANSWER, "rejected": [*ANSWER, *ASK, *WORSE]},
        ),
        (
            {"prompt": "p", "completion": "c", "label": False, "id": 3},
            "unpaired-preference",
            "unpaired preference (prompt, completion, label)",
            {"prompt": "p", "completion": "c", "label": False},
        ),
        (
            {"prompt": ASK, "completion": ANSWER, "label": True},
            "unpaired-preference",
            "unpaired preference (prompt, completion, label) as messages",
            {"prompt": ASK, "completion": ANSWER, "label": True},
        ),
        (
            {"text": "t", "label": "good", "id": 1},
            "classification",
            "text and label with labels as text",
            {"text": "t", "label": "good"},
        ),
        (
            {"text": "t", "label": 0},
            "classification",
            "text and label with labels as numbers",
            {"text": "t", "label": 0},
        ),
        (
            {"text": "t", "label": -0.5},
            "classification",
            "text and label with labels as numbers",
            {"text": "t", "label": -0.5},
        ),
        (
            {"text": "t", "label": ["old", "rare"]},
            "classification",
            "text and label with labels as lists",
            {"text": "t", "label": ["old", "rare"]},
        ),
        (
            {"tokens": ["New", "York"], "tags": ["B-LOC", "I-LOC"], "id": "1"},
            "token-classification",
            "tokens and tags with tags as text",
            {"tokens": ["New", "York"], "tags": ["B-LOC", "I-LOC"]},
        ),
        (
            {"tokens": ["York"], "tags": [5]},
            "token-classification",
            "tokens and tags with tags as numbers",
            {"tokens": ["York"], "tags": [5]},
        ),
        (
            {"source": "house", "target": "Haus", "id": 1},
            "source-target",
            "source and target",
            {"source": "house", "target": "Haus"},
        ),
        (
            {"prompt": "1 + 1", "answer": "2", "test": ["a", None]},
            "prompt",
            "prompt alone",
            {"prompt": "1 + 1", "answer": "2", "test": ["a", None]},
        ),
        ({"prompt": ASK, "n": 1}, "prompt", "prompt alone as messages", {"prompt": ASK, "n": 1}),
        ({"text": "t", "url": "u"}, "text", "text", {"text": "t"}),
        (
            {"prompt": "p", "completion": "c", "n": 1},
            "prompt-completion",
            "prompt and completion",
            {"prompt": "p", "completion": "c"},
        ),
        (
            {"messages": [SYSTEM, *ASK, *ANSWER, SYSTEM, *ASK, *ANSWER], "id": 1},
            "messages",
            "messages",
            {"messages": [SYSTEM, *ASK, *ANSWER, SYSTEM, *ASK, *ANSWER]},
        ),
    ],
)
def test_each_format_is_recognised_and_made_canonical(write, row, format_name, recognised, out):
    path = write("a.jsonl", [row])
    for wanted in ("auto", format_name):
        splits = load_splits(section(path, format=wanted))
        assert splits.train == [out]
        assert (splits.report.format, splits.report.recognised) == (format_name, recognised)
        assert splits.report.ignored_columns == sorted(row.keys() - out.keys())
    assert rows_of(path, accepts=[format_name]) == [out]


PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}
GPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
TASK = {"instruction": "Add", "input": "1 2", "output": "3"}
BOTH = {"prompt": "p", "completion": "c"}


@pytest.mark.parametrize(
    ("format_name", "good", "bad", "reason"),
    [
        ("preference", PAIR, PAIR | {"chosen": None}, r"chosen must be text, found null"),
        ("preference", PAIR, PAIR | {"rejected": " "}, r"rejected is empty"),
        ("preference", PAIR, PAIR | {"prompt": ""}, r"prompt is empty"),
        ("preference", PAIR, PAIR | {"chosen": "hunter2", "rejected": "hunter2"}, r"chosen and rejected are the same"),
        ("preference", PAIR, PAIR | {"prompt": ASK}, r"must be all text or all lists of messages"),
        ("preference", PAIR, PAIR | {"chosen": ANSWER}, r"rejected must be a list of messages, found text"),
        (
            "preference",
            PAIR,
            PAIR | {"chosen": ANSWER, "rejected": WORSE},
            r"must be all text or all lists of messages",
        ),
        (
            "preference",
            PAIR,
            PAIR | {"prompt": "hunter2", "chosen": ASK + ANSWER, "rejected": ASK + WORSE},
            r"prompt is not the last user message of chosen and rejected",
        ),
        (
            "preference",
            PAIR,
            {"prompt": ASK, "chosen": ASK + ANSWER, "rejected": WORSE},
            r"chosen and rejected must be answers, or begin with all messages of prompt",
        ),
        (
            "preference",
            PAIR,
            {"prompt": ASK, "chosen": ANSWER, "rejected": ASK},
            r"rejected must end with an assistant message, ends with user",
        ),
        (
            "preference",
            PAIR,
            {"prompt": ASK, "chosen": [], "rejected": WORSE},
            r"chosen is empty",
        ),
        (
            "preference",
            PAIR,
            {"prompt": ASK, "chosen": [{"role": "critic", "content": "hunter2"}], "rejected": WORSE},
            r"chosen\[0\]\.role must be system, user, assistant or tool",
        ),
        ("preference", PAIR, {"chosen": "hunter2", "rejected": "r"}, r"are text, so a prompt is needed beside them"),
        ("preference", PAIR, {"chosen": ANSWER, "rejected": WORSE}, r"must begin with the same messages"),
        ("preference", PAIR, {"chosen": CHAT, "rejected": CHAT}, r"chosen and rejected are the same"),
        (
            "preference",
            PAIR,
            {"prompt": "hunter2", "chosen": "c"},
            r"found the keys prompt, chosen; expected prompt and",
        ),
        (
            "unpaired-preference",
            {"prompt": "p", "completion": "c", "label": True},
            {"prompt": "p", "completion": "c", "label": 1},
            r"label must be true \(wanted\) or false \(unwanted\), found a number",
        ),
        (
            "unpaired-preference",
            {"prompt": "p", "completion": "c", "label": True},
            {"prompt": "p", "completion": "c", "label": "hunter2"},
            r"label must be true \(wanted\) or false \(unwanted\), found text",
        ),
        (
            "unpaired-preference",
            {"prompt": "p", "completion": "c", "label": True},
            {"prompt": "p", "completion": "", "label": True},
            r"completion is empty",
        ),
        ("classification", {"text": "t", "label": "a"}, {"text": "hunter2", "label": ""}, r"label is empty"),
        (
            "classification",
            {"text": "t", "label": 1},
            {"text": "t", "label": True},
            r"label must be text, a number or a list of text, found a boolean",
        ),
        (
            "classification",
            {"text": "t", "label": ["a"]},
            {"text": "t", "label": ["a", 3]},
            r"label\[1\] must be text, found a number",
        ),
        (
            "classification",
            {"text": "t", "label": 1},
            {"text": "t", "label": None},
            r"label must be text, a number or a list of text, found null",
        ),
        ("classification", {"text": "t", "label": 1}, {"text": "", "label": 1}, r"text is empty"),
        (
            "token-classification",
            {"tokens": ["a"], "tags": ["X"]},
            {"tokens": ["hunter2", "b"], "tags": ["X"]},
            r"2 tokens but 1 tags",
        ),
        ("token-classification", {"tokens": ["a"], "tags": ["X"]}, {"tokens": [], "tags": []}, r"tokens is empty"),
        (
            "token-classification",
            {"tokens": ["a"], "tags": ["X"]},
            {"tokens": "hunter2", "tags": ["X"]},
            r"tokens must be a list, found text",
        ),
        (
            "token-classification",
            {"tokens": ["a"], "tags": ["X"]},
            {"tokens": ["a", " "], "tags": ["X", "X"]},
            r"tokens\[1\] is empty",
        ),
        (
            "token-classification",
            {"tokens": ["a"], "tags": ["X"]},
            {"tokens": ["a", "b"], "tags": ["X", None]},
            r"tags\[1\] must be text or a whole number, found null",
        ),
        (
            "token-classification",
            {"tokens": ["a"], "tags": ["X"]},
            {"tokens": ["a", "b"], "tags": ["X", 1]},
            r"tags mixes text and numbers",
        ),
        ("source-target", {"source": "a", "target": "b"}, {"source": "hunter2", "target": ""}, r"target is empty"),
        (
            "source-target",
            {"source": "a", "target": "b"},
            {"source": ["hunter2"], "target": "b"},
            r"source must be text, found a list",
        ),
        (
            "source-target",
            {"source": "a", "target": "b"},
            {"translation": {"en": "hunter2", "de": "b"}},
            r"translation holds a text for each language \(en, de\): .*data\.columns: \{source: translation\.en",
        ),
        ("text", {"text": "t"}, {"text": " \n"}, r"text is empty"),
        ("text", {"text": "t"}, {"text": ["hunter2"]}, r"text must be text, found a list"),
        ("text", {"text": "t"}, {"body": "hunter2"}, r"found the keys body; expected text"),
        ("prompt-completion", BOTH, BOTH | {"completion": ""}, r"completion is empty"),
        ("prompt-completion", BOTH, BOTH | {"prompt": 3}, r"prompt must be text, found a number"),
        ("prompt-completion", BOTH, BOTH | {"prompt": ASK}, r"must be both text or both lists of messages"),
        ("prompt-completion", BOTH, {"prompt": "hunter2"}, r"found the keys prompt; expected prompt and completion"),
        ("prompt-completion", TASK, TASK | {"output": " "}, r"output is empty"),
        ("prompt-completion", TASK, TASK | {"instruction": None}, r"instruction must be text, found null"),
        ("prompt-completion", TASK, TASK | {"input": ["hunter2"]}, r"input must be text, found a list"),
        ("messages", GPT, {"conversations": []}, r"conversations is empty"),
        (
            "messages",
            GPT,
            {"conversations": [{"from": "human", "value": "hunter2"}]},
            r"conversations must end with an assistant message, ends with user",
        ),
        (
            "messages",
            GPT,
            {"conversations": [{"from": "hunter2", "value": "a"}]},
            r"conversations\[0\]\.from must be system, user, assistant or tool",
        ),
        (
            "messages",
            GPT,
            {"conversations": [{"from": "human", "value": None}]},
            r"conversations\[0\]\.value must be text, found null",
        ),
        ("messages", {"messages": CHAT}, {"messages": "hunter2"}, r"messages must be a list of messages, found text"),
        ("messages", {"messages": CHAT}, {"messages": ["hunter2"]}, r"messages\[0\] must be an object with role and"),
        ("prompt", {"prompt": "a"}, {"prompt": [], "answer": "hunter2"}, r"prompt is empty"),
        ("prompt", {"prompt": "a"}, {"prompt": 3, "answer": "hunter2"}, r"prompt must be text, found a number"),
    ],
)
def test_a_bad_row_of_each_format(write, format_name, good, bad, reason):
    path = write("a.jsonl", [good, bad])
    for arguments in ({"format": format_name}, {"accepts": [format_name]}):
        with pytest.raises(UserError, match=rf"a\.jsonl, line 2: .*{reason}") as error:
            rows_of(path, **arguments)
        assert SECRET not in str(error.value)
    report = load_splits(section(path, format=format_name, on_bad_row="skip")).report
    assert (report.rows_train, report.rows_skipped) == (1, 1)


def test_labels_of_two_kinds_are_mixed_formats(write):
    path = write("a.jsonl", [{"text": "t", "label": "a"}, {"text": "u", "label": 1}])
    with pytest.raises(UserError, match=r"line 2: this row is text and label with labels as numbers, but .* as text"):
        rows_of(path)


def test_columns_of_the_new_formats(write):
    path = write("ner.jsonl", [{"tokens": ["a"], "ner_tags": [0], "pos_tags": [7]}])
    assert rows_of(path, columns={"tags": "ner_tags"}) == [{"tokens": ["a"], "tags": [0]}]
    path = write("wmt.jsonl", [{"translation": {"en": "house", "de": "Haus"}}])
    mapping = {"source": "translation.en", "target": "translation.de"}
    assert rows_of(path, columns=mapping) == [{"source": "house", "target": "Haus"}]
    with pytest.raises(
        UserError, match=r"has no column 'translation\.fr' \(data\.columns\.target\): found translation"
    ):
        rows_of(path, columns=mapping | {"target": "translation.fr"})
    dotted = write("dots.jsonl", [{"a.b": "x", "a": {"b": "y"}}])
    assert rows_of(dotted, columns={"text": "a.b"}) == [{"text": "x"}]  # a column of that very name goes first
    path = write("dpo.jsonl", [{"question": "q", "good": "g", "bad": "b"}])
    mapping = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    assert rows_of(path, columns=mapping) == [{"prompt": "q", "chosen": "g", "rejected": "b"}]


def test_the_text_of_mbpp_is_a_prompt_where_prompts_are_read(write):
    row = {"text": "Write it.", "test_list": ["assert f() == 1"], "task_id": 7}
    path = write("a.jsonl", [row])
    kept = {"prompt": "Write it.", "test_list": ["assert f() == 1"], "task_id": 7}
    assert rows_of(path, accepts=["prompt"]) == rows_of(path, format="prompt") == [kept]
    assert rows_of(path, accepts=["text"]) == rows_of(path) == [{"text": "Write it."}]


def test_an_objective_takes_what_it_accepts(write):
    rich = write("rich.jsonl", [{"prompt": "p", "chosen": "c", "rejected": "r", "completion": "c", "text": "t"}])
    assert rows_of(rich)[0].keys() == {"prompt", "chosen", "rejected"}
    assert rows_of(rich, accepts=SFT) == [{"prompt": "p", "completion": "c"}]
    assert rows_of(rich, accepts=["text"]) == [{"text": "t"}]
    kept = {"prompt": "p", "chosen": "c", "rejected": "r", "completion": "c", "text": "t"}
    assert rows_of(rich, accepts=["prompt"]) == [kept]

    pairs_only = write("pairs.jsonl", [PAIR])
    with pytest.raises(
        UserError,
        match=r"pairs\.jsonl, line 1: is preference pairs, which the objective cannot use as they are; data\.format: "
        r"prompt-completion takes the chosen answers alone",
    ):
        rows_of(pairs_only, accepts=SFT)
    with pytest.raises(UserError, match=r"is preference pairs, which the objective cannot use: .*; expected text \("):
        rows_of(pairs_only, accepts=["text"])
    with pytest.raises(
        UserError, match=r"data\.format: the objective cannot use preference, but messages, prompt-completion or text"
    ):
        rows_of(pairs_only, accepts=SFT, format="preference")


def test_chosen_answers_are_taken_where_that_is_asked_for(write):
    path = write("pairs.jsonl", [PAIR | {"margin": 1.0}])
    taken = {"prompt": PAIR["prompt"], "completion": PAIR["chosen"]}
    assert rows_of(path, accepts=SFT, format="prompt-completion") == [taken]
    path = write("hh.jsonl", [{"chosen": CHAT, "rejected": [*ASK, *WORSE]}])
    assert rows_of(path, format="prompt-completion") == [{"prompt": ASK, "completion": ANSWER}]
    both = write("both.jsonl", [PAIR | {"completion": "mine"}])
    assert rows_of(both, format="prompt-completion") == [{"prompt": PAIR["prompt"], "completion": "mine"}]
    with pytest.raises(UserError, match="chosen and rejected are the same"):
        rows_of(write("same.jsonl", [PAIR | {"rejected": PAIR["chosen"]}]), format="prompt-completion")


def test_unwanted_completions_are_not_trained_on_unasked(write):
    path = write("kto.jsonl", [{"prompt": "p", "completion": "c", "label": False}])
    with pytest.raises(
        UserError, match=r"line 1: label says whether the completion is wanted .*data\.format: prompt-comp"
    ):
        rows_of(path, accepts=SFT)
    assert rows_of(path, accepts=SFT, format="prompt-completion") == [{"prompt": "p", "completion": "c"}]
    # Another kind of label says nothing of the sort.
    path = write("topic.jsonl", [{"prompt": "p", "completion": "c", "label": "sport"}])
    assert rows_of(path, accepts=SFT) == [{"prompt": "p", "completion": "c"}]


@pytest.mark.parametrize(
    "row",
    [
        lambda i, k: {"prompt": f"q{i}", "chosen": f"a{k}", "rejected": "r"},
        lambda i, k: {"prompt": [{"role": "user", "content": f"q{i}"}], "answer": k, "messages": "not a conversation"},
        lambda i, k: {"text": f"q {i}" + " " * k, "label": k},
        lambda i, k: {"tokens": ["q", str(i)], "tags": [k, k]},
        lambda i, k: {"source": f"q{i}", "target": f"a{k}"},
        lambda i, k: {"prompt": f"q{i}", "completion": f"a{k}", "label": bool(k)},
    ],
    ids=["preference", "prompt", "classification", "token-classification", "source-target", "unpaired-preference"],
)
def test_rows_with_one_question_stay_together(write, row):
    path = write("a.jsonl", [row(i, k) for i in range(20) for k in range(2)])
    # Without messages: in a file they would be taken for what is to be learned.
    splits = load_splits(section(path, eval_fraction=0.2), [f for f in FORMATS if f != "messages"])
    asked = [
        {str(r.get("prompt") or r.get("text", "").strip() or r.get("source") or r.get("tokens")) for r in side}
        for side in (splits.train, splits.eval)
    ]
    assert len(splits.eval) == 8 and len(asked[0]) == 16 and len(asked[1]) == 4 and not asked[0] & asked[1]


@pytest.mark.parametrize("switch", [{"train": False}, {"weight": 0}, {"train": False, "weight": 0}])
def test_a_turn_that_is_not_trained_on_keeps_its_switch(write, switch):
    rows = [{"messages": [CHAT[0], {**CHAT[1], **switch}, CHAT[0], {**CHAT[1], "weight": 1}]}]
    splits = load_splits(section(write("off.jsonl", rows)))
    assert splits.train == [{"messages": [CHAT[0], {**CHAT[1], "train": False}, *CHAT]}]


def test_a_margin_stays_beside_its_pair(write):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert load_splits(section(write("m.jsonl", [row | {"margin": 2}]))).train == [row | {"margin": 2.0}]
    with pytest.raises(UserError, match="margin must be a number, found text"):
        rows_of(write("bad.jsonl", [row | {"margin": "much"}]))
    for text in ("NaN", "1e999", "-1e999", "1e30", "-1000001", "1" + "0" * 400):
        path = write("far.jsonl", json.dumps(row)[:-1] + f', "margin": {text}}}\n')
        with pytest.raises(
            UserError, match=r"far\.jsonl.*(margin must be a finite number of at most 1,000,000|NaN|too large)"
        ):
            rows_of(path)


@pytest.mark.parametrize("label", ["1e999", "-1e999", "1" + "0" * 400])
def test_a_label_that_is_no_finite_number_is_refused(write, label):
    with pytest.raises(UserError, match=r"far\.jsonl, line 1: (label is not a finite number|a number is too large)"):
        rows_of(write("far.jsonl", f'{{"text": "a", "label": {label}}}\n'))


def test_what_messages_hold_beside_is_told(write):
    answer = CHAT[1] | {"citations": "Because.", "refusal": None, "audio": []}
    asked = CHAT[0] | {"name": "bob"}
    report = load_splits(section(write("a.jsonl", [{"messages": [asked, answer]}]))).report
    assert report.ignored_columns == ["messages.citations", "messages.name"]
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "thought": "c"}]
    report = load_splits(section(write("b.jsonl", [{"conversations": turns}]))).report
    assert report.ignored_columns == ["conversations.thought"]
    pair = {"prompt": [asked], "chosen": [answer], "rejected": [CHAT[1] | {"content": "No"}]}
    report = load_splits(section(write("c.jsonl", [pair]))).report
    assert report.ignored_columns == ["chosen.citations", "prompt.name"]
    report = load_splits(section(write("d.jsonl", [{"prompt": [asked]}])), ("prompt",)).report
    assert report.ignored_columns == ["prompt.name"]
