"""Faults that users meet when data are read, in every kind of file: told with file and line, or read as they are."""

import datetime
import functools
import gzip
import json

import pytest
from data_rows import SECRET, load_splits, pairs, rows_of, section, write_rows

from anyformer.recipes.errors import UserError

LONG = "0123456789" * 1_000_000


@pytest.fixture
def tmp_path(tmp_path_factory):
    """Without the test's parameters in its name, where the secret would be found."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def write(tmp_path):
    return functools.partial(write_rows, tmp_path)


def _table(rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows) if isinstance(rows, list) else pa.table(rows), sink)
    return sink.getvalue().to_pybytes()


def _csv(rows):
    quoted = [['"' + str(value).replace('"', '""') + '"' for value in row.values()] for row in rows]
    return "\n".join([",".join(rows[0]), *map(",".join, quoted), ""]).encode()


def _lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


WRITERS = {
    "jsonl": _lines,
    "json": lambda rows: json.dumps(rows, ensure_ascii=False).encode(),
    "csv": _csv,
    "tsv": lambda rows: _csv(rows).replace(b'","', b'"\t"').replace(b"prompt,completion", b"prompt\tcompletion"),
    "parquet": _table,
    "jsonl.gz": lambda rows: gzip.compress(_lines(rows)),
    "csv.gz": lambda rows: gzip.compress(_csv(rows)),
}
TEXTUAL = [kind for kind in WRITERS if kind != "parquet"]


def packed(kind, content):
    return gzip.compress(content) if kind.endswith(".gz") else content


@pytest.mark.parametrize("kind", WRITERS)
def test_text_is_read_as_it_is(write, kind):
    odd = [
        {"prompt": "2024-01-05", "completion": "2024-01-05T10:00:00Z"},
        {"prompt": "0042", "completion": "1e5"},
        {"prompt": "null", "completion": "NaN"},
        {"prompt": "one\u2028two\u2029three\u0085four", "completion": "a\x0bb\x0cc\x1cd"},
        {"prompt": 'quoted "twice"\nand broken', "completion": "tab\there, comma"},
        {"prompt": "\ufeffmark inside", "completion": "\U0001f600 é"},
        {"prompt": "long", "completion": LONG},
    ]
    assert rows_of(write(f"a.{kind}", WRITERS[kind](odd))) == odd
    stream = load_splits(section(write(f"a.{kind}", WRITERS[kind](odd)), streaming=True))
    assert list(stream.train) == odd


@pytest.mark.parametrize("kind", TEXTUAL)
def test_byte_order_marks(write, kind):
    raw = WRITERS[kind](pairs(2))
    raw = gzip.decompress(raw) if kind.endswith(".gz") else raw
    assert rows_of(write(f"a.{kind}", packed(kind, b"\xef\xbb\xbf" + raw))) == pairs(2)
    for coding, name in (("utf-16", "UTF-16"), ("utf-32", "UTF-32")):
        with pytest.raises(UserError, match=rf"a\.{kind}: is {name}, by its first bytes: convert the file to UTF-8"):
            rows_of(write(f"a.{kind}", packed(kind, raw.decode().encode(coding))))
    for coding in ("utf-16-le", "utf-16-be"):
        with pytest.raises(UserError, match=rf"a\.{kind}: begins with null bytes, as UTF-16 does"):
            rows_of(write(f"a.{kind}", packed(kind, raw.decode().encode(coding))))
    with pytest.raises(UserError, match=r"a\.txt: is UTF-16"):
        rows_of(write("a.txt", "text".encode("utf-16")))


@pytest.mark.parametrize("kind", TEXTUAL)
def test_bytes_that_are_not_utf_8(write, kind):
    raw = WRITERS[kind]([*pairs(1), {"prompt": "hunter2", "completion": "caf@"}])
    raw = (gzip.decompress(raw) if kind.endswith(".gz") else raw).replace(b"@", b"\xe9")
    where = {"jsonl": ", line 2: byte 0xe9", "json": ": byte 0xe9 at byte"}.get(
        kind.removesuffix(".gz"), ", line 3: bytes that"
    )
    with pytest.raises(UserError, match=rf"a\.{kind}{where} .*not UTF-8") as error:
        rows_of(write(f"a.{kind}", packed(kind, raw)))
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_what_one_row_holds_does_not_change_another(write, kind):
    """Nulls here and text there, keys that some rows lack, numbers beside text: no type is made of a column."""
    first = [{"prompt": "p", "completion": "c", "note": None, "extra": None}]
    second = [{"prompt": "q", "completion": "d", "note": "2024-01-05", "n": 3}]
    files = [write(f"{name}.{kind}", WRITERS[kind](rows)) for name, rows in (("a", first), ("b", second))]
    splits = load_splits(section(files))
    assert splits.train == [{"prompt": "p", "completion": "c"}, {"prompt": "q", "completion": "d"}]
    assert splits.report.ignored_columns == ["extra", "n", "note"]
    # A prompt keeps its other columns, each as its own file has it.
    kept = load_splits(section(files), ["prompt"]).train
    assert [row["note"] for row in kept] == [None, "2024-01-05"] and "n" not in kept[0]


def test_rows_of_one_file_may_lack_what_is_not_used(write):
    rows = [{"text": "a", "id": 1}, {"text": "b"}, {"id": "x", "text": "c", "tags": ["y"]}]
    assert rows_of(write("a.jsonl", rows)) == [{"text": text} for text in "abc"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (datetime.datetime(2024, 1, 5, 10), "a timestamp"),
        (datetime.date(2024, 1, 5), "a date"),
        (datetime.time(10, 30), "a time"),
        (b"bytes", "bytes"),
        (3, "a number"),
    ],
)
def test_parquet_columns_that_are_no_text(write, value, kind):
    path = write("a.parquet", _table([{"prompt": "p", "completion": value}]))
    with pytest.raises(UserError, match=rf"a\.parquet, row 1: completion must be text, found {kind}") as error:
        rows_of(path)
    assert "2024" not in str(error.value)
    unused = write("b.parquet", _table([{"prompt": "p", "completion": "c", "when": value}]))
    assert rows_of(unused) == [{"prompt": "p", "completion": "c"}]


def test_a_timestamp_that_python_cannot_hold(write):
    import pyarrow as pa

    when = pa.array([0, 2**59], pa.timestamp("us"))
    path = write("a.parquet", _table({"text": ["a", "b"], "when": when}))
    with pytest.raises(UserError, match=r"a\.parquet, row 2: a timestamp beyond what Python can hold"):
        rows_of(path)
    assert rows_of(path, on_bad_row="skip") == [{"text": "a"}]


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz"])
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"text": "hunter2", "text": "b"}', "duplicate key: text"),
        ('{"text": "hunter2", "meta": {"a": 1, "a": 2}}', "duplicate key: a"),
        ('{"text": "hunter2", "n": NaN}', "NaN is not JSON"),
        ('{"text": "hunter2", "n": Infinity}', "Infinity is not JSON"),
    ],
)
def test_json_that_readers_take_differently(write, kind, row, reason):
    good = '{"text": "a"}'
    content = f"[{good},\n{row},\n{good}]" if kind == "json" else f"{good}\n{row}\n{good}\n"
    path = write(f"a.{kind}", packed(kind, content.encode()))
    with pytest.raises(UserError, match=rf"a\.{kind}, line 2: {reason}") as error:
        rows_of(path)
    assert SECRET not in str(error.value)
    assert rows_of(path, on_bad_row="skip") == [{"text": "a"}] * 2


@pytest.mark.parametrize("kind", WRITERS)
def test_an_empty_file_of_each_kind(write, kind):
    empty = _table({"text": []}) if kind == "parquet" else packed(kind, b"")
    with pytest.raises(UserError, match=rf"a\.{kind}: the file is empty: it holds no rows"):
        rows_of(write(f"a.{kind}", empty))


# Several at once


def test_the_first_faults_of_a_file_are_told_together(write):
    good, null = '{"prompt": "p", "completion": "c"}', '{"prompt": "p", "completion": null}'
    path = write("a.jsonl", "\n".join([good, null, "{", good, null, good]))
    with pytest.raises(UserError) as error:
        rows_of(path)
    assert str(error.value).split("\n") == [
        f"{path}, line 2: completion must be text, found null. The same in 5.",
        f"{path}, line 3: broken JSON at column 2: Expecting property name enclosed in double quotes. "
        "(data.on_bad_row: skip leaves such rows out.)",
    ]


def test_reading_stops_after_five_faults(write):
    path = write("a.jsonl", "\n".join(["{"] * 7))
    with pytest.raises(UserError) as error:
        rows_of(path)
    first, last = str(error.value).split("\n")
    assert first.endswith(" The same in 2, 3, 4, 5.")
    assert last == (
        "Reading stopped at the 5th unusable row; there may be more. (data.on_bad_row: skip leaves such rows out.)"
    )


def test_a_single_fault_does_not_read_a_whole_corpus(write):
    rows = [json.dumps({"text": str(i)}) for i in range(30_000)]
    rows[3] = rows[25_000] = "{"
    with pytest.raises(UserError) as error:
        rows_of(write("a.jsonl", "\n".join(rows)))
    assert "line 4:" in str(error.value) and "25001" not in str(error.value)


def test_faults_are_told_with_a_row_of_another_format(write):
    path = write("a.jsonl", '{"text": "a"}\n{"text": null}\n{"prompt": "p", "completion": "c"}\n')
    with pytest.raises(UserError) as error:
        rows_of(path)
    first, second = str(error.value).split("\n")
    assert ", line 2: text must be text, found null" in first
    assert ", line 3: this row is prompt and completion, but" in second


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_beyond_all_numbers_is_not_made_infinite(write, name):
    text = '{"prompt": "a", "answer": 1e999}'
    path = write(name, f"[{text}]" if name == "a.json" else text)
    with pytest.raises(UserError, match="line 1: a number is too large: store it as text"):
        rows_of(path, ("prompt",))


def test_a_terminal_does_not_obey_the_names_of_columns(write):
    with pytest.raises(UserError, match="found the keys") as error:
        rows_of(write("a.jsonl", '{"\\u001b[31mred\\n\\ud800": 1}'))
    assert "found the keys \\x1b[31mred\\x0a\\xd800;" in str(error.value)


def test_names_that_are_no_files(tmp_path):
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    with pytest.raises(
        UserError, match=r"data\.source: cannot read .*loop\.jsonl: it is a link that leads back to itself"
    ):
        rows_of(str(loop))
    for name in ("x" * 5000, "x" * 5000 + ".jsonl"):
        with pytest.raises(UserError, match=r"data\.source: no file matches"):
            rows_of(name)
