"""Rows from a user's function: read like those of a file, and its faults told with its own lines."""

import pytest
from data_rows import CHAT, load_splits, pairs, rows_of, section, write_rows

from anyformer.recipes.errors import UserError

CODE = """
from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Pair:
    prompt: str


def rows(count: int = 3, word: str = "Question"):
    for i in range(count):
        yield {"prompt": Pair(f"{word} {i}?").prompt, "completion": f"Answer {i}."}


def as_list():
    return [{"messages": ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"})}]


def fails():
    yield {"prompt": "p", "completion": "c"}
    deeper()


def deeper():
    raise KeyError("hunter2-key")


def leaves():
    raise SystemExit(0)


def bad_rows():
    yield {"prompt": "p", "completion": "c"}
    yield {"prompt": "p", "completion": 3}
    yield ["p", "c"]
    yield {"prompt": "p", "completion": "c", "extra": object()}
    yield {"prompt": "p", "completion": "c", "extra": float("nan")}
    yield {"prompt": "p", "completion": "c", 3: "x"}
    yield {"prompt": "p", "completion": None}


def no_rows():
    return []


def nothing():
    pass


async def later():
    return []
"""


@pytest.fixture
def code(tmp_path):
    return write_rows(tmp_path, "mine.py", CODE)


def test_a_function_gives_rows(code):
    assert rows_of(f"{code}:rows") == pairs(3)
    assert rows_of({"python": f"{code}:rows", "arguments": {"count": 2, "word": "Ask"}})[1]["prompt"] == "Ask 1?"
    assert rows_of(f"{code}:as_list") == [{"messages": CHAT}]
    splits = load_splits(
        section([{"python": f"{code}:rows", "arguments": {"count": 50}}, f"{code}:as_list"], max_rows=4)
    )
    assert splits.train == pairs(4)
    columns = {"prompt": "completion", "completion": "prompt"}
    assert rows_of({"path": f"{code}:rows", "columns": columns})[0]["prompt"] == "Answer 0."


def test_each_row_is_held_to_what_a_file_could_hold(code):
    with pytest.raises(UserError) as error:
        rows_of(f"{code}:bad_rows")
    lines = str(error.value).split("\n")
    for line, number, reason in zip(
        lines,
        range(2, 7),
        (
            "completion must be text, found a number",
            "expected a dict with named fields, found a list",
            "extra holds a value of type object: give text, numbers, lists and dicts",
            "extra is no finite number",
            "a key must be text, found a number",
        ),
        strict=False,
    ):
        assert line.endswith(f"mine.py:bad_rows, row {number}: {reason}.")
    assert lines[5].startswith("Reading stopped at the 5th unusable row")
    splits = load_splits(section(f"{code}:bad_rows", on_bad_row="skip"))
    assert (len(splits.train), splits.report.rows_skipped) == (1, 6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fails", r"data\.source: .*mine\.py:fails raises KeyError: 'hunter2-key' \(line LINE\)$"),
        ("leaves", r"mine\.py:leaves raises SystemExit: 0 \(line LINE\)$"),
        ("rows_", r"defines no function 'rows_'; it has rows, .*did you mean rows\?"),
        ("later", r"mine\.py:later is async; write a plain function"),
        ("nothing", r"mine\.py:nothing gives null: it must return or yield rows"),
        ("no_rows", r"mine\.py:no_rows: gives no rows"),
    ],
)
def test_faults_of_a_function(code, function, message):
    raising = {"fails": '    raise KeyError("hunter2-key")', "leaves": "    raise SystemExit(0)"}
    line = CODE.split("\n").index(raising[function]) + 1 if function in raising else 0
    with pytest.raises(UserError, match=message.replace("LINE", str(line))):
        rows_of(f"{code}:{function}")


def test_a_wrong_argument_and_a_broken_file(code, tmp_path):
    with pytest.raises(UserError, match=r"raises TypeError: .*unexpected keyword argument 'cuont'"):
        rows_of({"python": f"{code}:rows", "arguments": {"cuont": 2}})
    with pytest.raises(UserError, match=r"data\.source: .*gone\.py cannot be read: No such file"):
        rows_of(f"{tmp_path / 'gone.py'}:rows")
    broken = write_rows(tmp_path, "broken.py", "def rows(:\n")
    with pytest.raises(UserError, match=r"broken\.py is no Python"):
        rows_of(f"{broken}:rows")
    raising = write_rows(tmp_path, "raising.py", "x = 1\ny = x / 0\ndef rows(): return []\n")
    with pytest.raises(UserError, match=r"raising\.py raises ZeroDivisionError: division by zero \(line 2\)"):
        rows_of(f"{raising}:rows")


def test_the_file_counts_for_the_digest(code, tmp_path):
    first = load_splits(section(f"{code}:rows")).digest
    assert load_splits(section(f"{code}:rows")).digest == first
    write_rows(tmp_path, "mine.py", CODE + "# another version\n")
    assert load_splits(section(f"{code}:rows")).digest != first
