import functools
import gzip
import json

import pytest
from data_rows import CHAT, SECRET, SFT, pairs, rows_of, section, write_rows

from anyformer.recipes.data import load_splits, split_by_prompt
from anyformer.recipes.data.files import Skipped
from anyformer.recipes.errors import UserError


@pytest.fixture
def tmp_path(tmp_path_factory):
    """Without the test's parameters in its name, where the secret would be found."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def write(tmp_path):
    return functools.partial(write_rows, tmp_path)


# Kinds of file


def test_jsonl_breaks_lines_at_newline_only(write):
    text = "one\u2028two\u0085three\x0bfour"
    path = write("a.jsonl", [{"text": text}, {"text": "last"}])
    assert rows_of(path) == [{"text": text}, {"text": "last"}]


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}',
        b'{"text": "a"}\r\n{"text": "b"}\r\n',
        b'{"text": "a"}\n\n  \n{"text": "b"}\n\n',
    ],
    ids=["bom", "crlf", "blank lines"],
)
def test_jsonl_variants(write, content):
    assert rows_of(write("a.jsonl", content)) == [{"text": "a"}, {"text": "b"}]


def test_gzip(write):
    raw = b'{"text": "a"}\n{"text": "b"}\n'
    assert rows_of(write("a.jsonl.gz", gzip.compress(raw))) == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz: the gzip archive is damaged or cut short"):
        rows_of(write("cut.jsonl.gz", gzip.compress(raw)[:-12]))
    with pytest.raises(UserError, match=r"not\.jsonl\.gz: the gzip archive is damaged"):
        rows_of(write("not.jsonl.gz", raw))


def test_json_list(write):
    assert rows_of(write("a.json", '\ufeff[\n {"text": "a"},\n {"text": "b"}\n]\n')) == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', r"expected a list of objects.*\.jsonl"),
        ('[\n{"text": "a"},\n{"text" "b"}\n]', r"line 3: broken JSON at column 9: Expecting"),
        ('[\n{"text": "a"}\n{"text": "b"}\n]', r"line 3: broken JSON: expected a comma"),
        ('[\n{"text": "a"},\n]', r"line 3: broken JSON: expected a comma and an object"),
        ('[\n{"text": "a"}\n', r"line 3: broken JSON: expected a comma .* or the list's end"),
        ('[\n{"text": "a"}\n]\n[]', r"broken JSON: text after the end"),
        ('[\n{"text": "a"},\n{"text": "b", "text": "hunter2"}\n]', r"line 3: duplicate key: text"),
        ('[\n{"text": "a"},\n{"text": "b", "n": NaN}\n]', r"line 3: NaN is not JSON"),
        ('[\n{"text": "a"},\n"hunter2"\n]', r"line 3: expected an object with named fields, found text"),
        ("[]", "the file is empty"),
        ("", "the file is empty"),
    ],
)
def test_json_faults_have_a_line(write, content, reason):
    with pytest.raises(UserError, match=rf"a\.json.*{reason}") as error:
        rows_of(write("a.json", content))
    assert SECRET not in str(error.value)


def test_csv_keeps_text_as_text(write):
    path = write(
        "a.csv",
        '\ufeffprompt,completion,when\n0042,2024-01-05,x\n"two\nlines, ""quoted""",1e5,y\nNA,true,z\n',
    )
    assert rows_of(path) == [
        {"prompt": "0042", "completion": "2024-01-05"},
        {"prompt": 'two\nlines, "quoted"', "completion": "1e5"},
        {"prompt": "NA", "completion": "true"},
    ]


def test_csv_longer_than_the_modules_default_limit(write):
    assert len(rows_of(write("a.csv", "text\n" + "x" * 200_000 + "\n"))[0]["text"]) == 200_000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'prompt,completion\n"a\nb",c\nd,e,hunter2\n', r"line 4: 3 fields where the header has 2"),
        (b"prompt,completion\na,hunter2 caf\xe9\n", r"line 2: bytes that are not UTF-8"),
        (b'prompt,completion\na,b\nc,"hunter2\nx,y\n', r"line 3: a quote opened here is never closed"),
        (b'prompt,completion\na,"b"hunter2\n', r"line 2: broken CSV"),
        (b"prompt,prompt\na,b\n", r"line 1: the header names a column twice: prompt"),
        (b"prompt,completion\na,\n", r"line 2: completion is empty"),
        (b"prompt,completion\n", r"the file is empty"),
        (b"", r"the file is empty: it holds no rows\.$"),  # nothing to leave out
    ],
)
def test_csv_faults(write, content, reason):
    with pytest.raises(UserError, match=rf"a\.csv.*{reason}") as error:
        rows_of(write("a.csv", content))
    assert SECRET not in str(error.value)


def test_parquet(tmp_path, write):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = str(tmp_path / "a.parquet")
    chats = [CHAT, [*CHAT, {"role": "user", "content": "More"}]]
    pq.write_table(pa.table({"messages": chats, "id": [1, 2]}), path)
    with pytest.raises(UserError, match=r"a\.parquet, row 2: messages must end with an assistant message"):
        rows_of(path)
    splits = load_splits(section(path, on_bad_row="skip"))
    assert splits.train == [{"messages": CHAT}]
    assert splits.report.ignored_columns == ["id"]

    broken = pa.array([b"fine", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken}), path)
    with pytest.raises(UserError, match=r"row 2: text that is not UTF-8"):
        rows_of(path)
    pq.write_table(pa.table({"text": pa.array([1.5])}), path)
    with pytest.raises(UserError, match=r"row 1: text must be text, found a number"):
        rows_of(path)
    with pytest.raises(UserError, match=r"b\.parquet: not a readable Parquet file"):
        rows_of(write("b.parquet", b"PAR1 not really"))


def test_txt_is_one_document_a_file_and_globs_are_sorted(write, tmp_path):
    write("b.txt", "second\r\n")
    write("a.txt", "\ufefffirst\n\nparagraph")
    splits = load_splits(section(str(tmp_path / "*.txt")))
    assert splits.train == [{"text": "first\n\nparagraph"}, {"text": "second\r\n"}]
    assert [name.rsplit("/", 1)[-1] for name in splits.report.sources] == ["a.txt", "b.txt"]
    write("c.txt", b"one\ntwo caf\xe9\n")
    with pytest.raises(UserError, match=r"c\.txt: byte 0xe9 at line 2, byte 8 is not UTF-8"):
        rows_of(str(tmp_path / "*.txt"))


# Where the files are


def test_sources(write, tmp_path):
    a, b = write("a.jsonl", [{"text": "a"}]), write("b[1].jsonl", [{"text": "b"}])
    assert rows_of([b, a]) == [{"text": "b"}, {"text": "a"}]  # brackets in a name that exists are literal
    assert rows_of([a, str(tmp_path / "a*"), a]) == [{"text": "a"}]  # each file once
    with pytest.raises(UserError, match=r"data\.source: no file matches .*Did you mean .*a\.jsonl\?"):
        rows_of(str(tmp_path / "aa.jsonl"))
    with pytest.raises(UserError, match=r"no file matches.*folder .*gone does not exist"):
        rows_of(str(tmp_path / "gone" / "a.jsonl"))
    with pytest.raises(UserError, match=r"cannot read .*a\.xlsx: expected one of \.jsonl"):
        rows_of(write("a.xlsx", b"x"))
    with pytest.raises(UserError, match=r"data\.source: names no file"):
        rows_of([])


# Bad rows


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "hunter2 caf\xe9", "completion": "x"}', r"byte 0xe9 at byte 24 of the line is not UTF-8"),
        (b'{"prompt": "hunter2", "completion": x}', r"broken JSON at column 37: Expecting value"),
        (b'{"prompt": "hunter2", "completion": "x"', r"broken JSON at column 40: Expecting ',' delimiter"),
        (b'{"prompt" "hunter2", "completion": "x"}', r"broken JSON at column 11: Expecting ':' delimiter"),
        (b'{"prompt": "a\\hunter2", "completion": "x"}', r"broken JSON at column 14: Invalid"),
        (b'{"prompt": "hunter2", "prompt": "b", "completion": "x"}', r"duplicate key: prompt"),
        (b'{"prompt": "hunter2", "completion": "x", "score": NaN}', r"NaN is not JSON"),
        (b'{"prompt": "hunter2", "completion": "x", "score": -Infinity}', r"-Infinity is not JSON"),
        (b'["hunter2", "x"]', r"expected an object with named fields, found a list"),
        (b'{"prompt": "hunter2", "completion": null}', r"completion must be text, found null"),
        (b'{"prompt": null, "completion": "hunter2"}', r"prompt must be text, found null"),
        (b'{"prompt": "hunter2", "completion": " \\n"}', r"completion is empty"),
        (b'{"prompt": "", "completion": "hunter2"}', r"prompt is empty"),
        (b'{"prompt": "hunter2", "completion": 7}', r"completion must be text, found a number"),
        (b'{"prompt": "hunter2", "completion": ["x"]}', r"must be both text or both lists"),
        (b'{"prompt": "hunter2", "completion": "\\ud800"}', r"completion holds half of a surrogate pair"),
        (b'{"prompt": "hunter2", "answer": "x"}', r"found the keys prompt, answer; expected .*prompt and completion"),
        (b'{"prompt": "hunter2", "n": ' + b"9" * 5000 + b"}", r"a number is too long"),
        (b"[" * 100_000, r"JSON nested too deeply"),
    ],
)
def test_a_bad_row_is_located_without_quoting_it(write, line, reason):
    good = b'{"prompt": "p", "completion": "c"}'
    path = write("a.jsonl", b"\n".join([good, b"", line, good.replace(b'"p"', b'"q"'), b""]))
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3: .*{reason}") as error:
        rows_of(path, accepts=SFT)
    assert SECRET not in str(error.value)
    splits = load_splits(section(path, on_bad_row="skip"), SFT)
    assert len(splits.train) == 2
    assert splits.report.rows_read == 3 and splits.report.rows_skipped == 1
    (skipped,) = splits.report.skipped
    assert (skipped.file, skipped.line) == (path, 3) and SECRET not in skipped.reason


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hunter2", r"messages must be a list of messages, found text"),
        ([], r"messages is empty"),
        (["hunter2"], r"messages\[0\] must be an object with role and content"),
        (
            [{"role": "critic", "content": "hunter2"}, *CHAT],
            r"messages\[0\]\.role must be system, user, assistant or tool",
        ),
        ([{"content": "hunter2"}, *CHAT], r"messages\[0\]\.role must be"),
        ([{"role": ["user"], "content": "hunter2"}], r"messages\[0\]\.role must be"),
        ([{"role": "user", "content": None}, *CHAT], r"messages\[0\]\.content must be text, found null"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content must be text, found a list"),
        ([*CHAT, {"role": "user", "content": "hunter2"}], r"must end with an assistant message, ends with user"),
        ([CHAT[0], {"role": "assistant", "content": "\n"}], r"the last assistant message of messages is empty"),
        ([CHAT[0], {**CHAT[1], "tool_calls": [{}]}], r"messages\[1\]\.tool_calls\[0\]\.name must be text"),
        ([CHAT[0], {**CHAT[1], "weight": 0.5}], r"messages\[1\]\.weight must be 0 or 1"),
        ([CHAT[0], {**CHAT[1], "train": "no"}], r"messages\[1\]\.train must be true or false, found text"),
        ([CHAT[0], {**CHAT[1], "train": True, "weight": 0}], r"messages\[1\] has train and weight, which contradict"),
    ],
)
def test_bad_conversations(write, messages, reason):
    path = write("a.jsonl", [{"messages": CHAT}, {"messages": messages}])
    with pytest.raises(UserError, match=rf"line 2: .*{reason}") as error:
        rows_of(path)
    assert SECRET not in str(error.value)


def test_empty_files(write):
    empty, blank, good = write("e.jsonl", b""), write("w.txt", b" \n"), write("a.jsonl", [{"text": "a"}])
    for path in (empty, blank):
        with pytest.raises(UserError, match=r"(e\.jsonl|w\.txt): the file is empty"):
            rows_of([good, path])
    report = load_splits(section([empty, good], on_bad_row="skip")).report
    assert report.skipped == [Skipped(empty, 0, "the file is empty: it holds no rows")]
    assert report.rows_read == 1
    with pytest.raises(UserError, match=r"no usable row in .*1 skipped, the first at .*e\.jsonl: the file is empty"):
        load_splits(section(empty, on_bad_row="skip"))


# The held-out part


def test_random_split_keeps_equal_prompts_together(write):
    rows = [{"prompt": f"Question {i % 40}?", "completion": f"Answer {i}."} for i in range(200)]
    splits = load_splits(section(write("a.jsonl", rows), eval_fraction=0.1))
    assert (len(splits.train), len(splits.eval)) == (180, 20)
    assert not {r["prompt"] for r in splits.train} & {r["prompt"] for r in splits.eval}
    assert sorted(map(str, splits.train + splits.eval)) == sorted(map(str, rows))
    assert splits.train == [row for row in rows if row in splits.train]  # order kept
    again = load_splits(section(write("a.jsonl", rows), eval_fraction=0.1))
    assert again.eval == splits.eval
    assert load_splits(section(write("a.jsonl", rows), eval_fraction=0.1, seed=1)).eval != splits.eval
    assert "seed 0" in splits.report.split
    assert (splits.report.rows_train, splits.report.rows_eval) == (180, 20)


def test_conversations_with_the_same_opening_stay_together():
    opening = {"role": "user", "content": "Hi"}
    rows = []
    for i in range(10):
        first = [{**opening, "content": f"Hi {i}"}, CHAT[1]]
        rows += [{"messages": first}, {"messages": [*first, {"role": "user", "content": "And?"}, CHAT[1]]}]
    train, held = split_by_prompt(rows, 0.2, 0)
    assert len(held) == 4
    assert not {r["messages"][0]["content"] for r in train} & {r["messages"][0]["content"] for r in held}


@pytest.mark.parametrize(("count", "fraction", "held"), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.99, 9), (10, 0.25, 2)])
def test_both_sides_get_a_row(count, fraction, held):
    train, evaluated = split_by_prompt(pairs(count), fraction, 0)
    assert (len(train), len(evaluated)) == (count - held, held)


def test_large_groups_do_not_swallow_the_training_side():
    rows = [{"prompt": "same", "completion": str(i)} for i in range(50)] + pairs(2)
    train, held = split_by_prompt(rows, 0.02, 0)
    assert len(held) == 1 and len(train) == 51


def test_one_prompt_cannot_be_split(write):
    path = write("a.jsonl", [{"prompt": "same", "completion": str(i)} for i in range(5)])
    with pytest.raises(
        UserError, match=r"data\.eval_fraction: cannot hold rows out: all 5 usable rows have one prompt"
    ):
        load_splits(section(path, eval_fraction=0.1))
    assert load_splits(section(path)).eval == []  # nothing held out on request
    with pytest.raises(UserError, match=r"data\.eval_fraction must be at least 0 and below 1"):
        load_splits(section(path, eval_fraction=1.0))


def test_eval_source(write):
    a, b = write("a.jsonl", pairs(5)), write("b.jsonl", pairs(8)[4:])
    splits = load_splits(section(a, eval_source=b, eval_fraction=0.1))
    assert (splits.report.rows_train, splits.report.rows_eval, splits.report.rows_read) == (5, 4, 9)
    assert splits.report.eval_sources == [b] and b in splits.report.split
    assert splits.report.warnings[0].startswith("1 of 4 held-out rows have a prompt that is also trained on")
    with pytest.raises(UserError, match=r"data\.eval_source: .*a\.jsonl is named in data\.source too"):
        load_splits(section(a, eval_source=a))
    with pytest.raises(UserError, match=r"data\.eval_source: no file matches"):
        load_splits(section(a, eval_source=a + ".gone"))
    with pytest.raises(UserError, match=r"c\.jsonl, line 1: this row is text"):
        load_splits(section(a, eval_source=write("c.jsonl", [{"text": "t"}])))


def test_row_limits(write):
    good = "".join(json.dumps(row) + "\n" for row in pairs(30))
    path = write("a.jsonl", good + "{broken")
    splits = load_splits(section(path, max_rows=10, eval_fraction=0.5))  # what is not needed is not read
    assert (len(splits.train), len(splits.eval), splits.report.rows_read) == (10, 10, 20)
    splits = load_splits(section(path, max_rows=7, eval_fraction=0.5, max_eval_rows=3))
    assert (len(splits.train), len(splits.eval)) == (7, 3)
    assert rows_of(path, max_rows=4) == pairs(4)
