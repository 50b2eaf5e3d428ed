"""Several sources in one recipe: where rows may come from, how they are mixed, and what is told of each."""

import bz2
import functools
import gzip
import json
import lzma

import pytest
from data_rows import CHAT, SFT, pairs, rows_of, section, write_rows

from anyformer.recipes.console import source_lines
from anyformer.recipes.data import load_splits, prompt_key
from anyformer.recipes.errors import UserError

ROWS = [{"text": "a"}, {"text": "b\u2028c"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.fixture
def write(tmp_path):
    return functools.partial(write_rows, tmp_path)


def zstd(raw: bytes) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}
KINDS = {
    "jsonl": LINES,
    "json": json.dumps(ROWS).encode(),
    "csv": 'text\na\n"b\u2028c"\n'.encode(),
    "tsv": "text\tn\na\t1\nb\u2028c\t2\n".encode(),
}


# Files


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_text_may_be_compressed(write, kind, packing):
    assert rows_of(write(f"plain.{kind}", KINDS[kind])) == ROWS
    assert rows_of(write(f"a.{kind}.{packing}", PACKED[packing](KINDS[kind]))) == ROWS
    assert rows_of(write(f"A.{kind.upper()}.{packing}", PACKED[packing](KINDS[kind]))) == ROWS


@pytest.mark.parametrize("packing", PACKED)
def test_compressed_text_and_damaged_archives(write, packing):
    pack, name = PACKED[packing], {"gz": "gzip", "bz2": "bzip2", "zst": "zstd"}.get(packing, packing)
    assert rows_of(write(f"a.txt.{packing}", pack(b"one\n\ntwo"))) == [{"text": "one\n\ntwo"}]
    assert rows_of(write(f"lines.json.{packing}", pack(b"\n" + LINES))) == ROWS  # as it is often published
    for content in (pack(LINES * 2000)[:-9], b"no archive at all, but text", LINES):
        with pytest.raises(UserError, match=rf"bad\.jsonl\.{packing}: the {name} archive is damaged or cut short"):
            rows_of(write(f"bad.jsonl.{packing}", content))
    with pytest.raises(UserError, match=rf"e\.jsonl\.{packing}: the file is empty"):
        rows_of(write(f"e.jsonl.{packing}", pack(b"")))
    with pytest.raises(UserError, match=rf"l\.jsonl\.{packing}, line 2: byte 0xe9 at byte 14 of the line is not UTF-8"):
        rows_of(write(f"l.jsonl.{packing}", pack(b'{"text": "a"}\n{"text": "caf\xe9"}\n')))


def test_a_folder_is_all_that_can_be_read_in_it(tmp_path):
    for name, text in (
        ("b.txt", "second"),
        ("a/deep/x.txt", "first"),
        ("c.jsonl", '{"text": "third"}'),
        ("notes.md", "not read"),
        (".hidden.txt", "not read"),
        (".git/x.txt", "not read"),
    ):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(text, encoding="utf-8")
    assert [row["text"] for row in rows_of(str(tmp_path / "data"))] == ["first", "second", "third"]
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.md").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match=r"data\.source: no file in the folder .*none can be read: expected \.jsonl"):
        rows_of(str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"cannot read .*a\.zip: expected one of .* Unpack it first"):
        rows_of(write_rows(tmp_path, "a.zip", b"PK"))
    with pytest.raises(UserError, match=r"cannot read .*a\.parquet\.gz: expected one of"):
        rows_of(write_rows(tmp_path, "a.parquet.gz", b"x"))


def test_a_missing_file_names_the_folder_that_was_looked_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, "rows.jsonl", ROWS)
    expected = (
        rf"no file matches 'row\.jsonl' \(relative paths are taken from {tmp_path}\)\. Did you mean rows\.jsonl\?"
    )
    with pytest.raises(UserError, match=expected):
        rows_of("row.jsonl")
    assert rows_of("rows.jsonl") == ROWS


# Mixing


def test_forms_of_one_format_may_be_mixed(write):
    share = [{"conversations": [{"from": "human", "value": "Hey"}, {"from": "gpt", "value": "Ho"}]}]
    alpaca = [{"instruction": "Greet", "output": "Hi"}]
    both = [{"prompt": CHAT[:1], "completion": CHAT[1:]}]
    paths = [
        write(name, rows)
        for name, rows in (
            ("m.jsonl", [{"messages": CHAT}]),
            ("s.jsonl", share),
            ("a.jsonl", alpaca),
            ("p.jsonl", both),
        )
    ]
    splits = load_splits(section(paths), SFT)
    assert [set(row) for row in splits.train] == [{"messages"}, {"messages"}, *[{"prompt", "completion"}] * 2]
    assert [part.forms for part in splits.report.by_source] == [
        ["messages"],
        ["ShareGPT (conversations), converted to messages"],
        ["Alpaca (instruction, input, output), converted to messages"],
        ["prompt and completion as messages"],
    ]
    assert splits.report.format == "messages"
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: is Alpaca .*which the objective cannot use"):
        load_splits(section(paths), ["messages"])
    with pytest.raises(UserError, match=r"t\.jsonl, line 1: this row is text, but .*m\.jsonl, line 1 is messages"):
        load_splits(section([paths[0], write("t.jsonl", [{"text": "t"}])]), SFT)
    with pytest.raises(
        UserError, match=r"line 1: this row is prompt and completion, but .* is prompt and completion as"
    ):
        load_splits(section([paths[3], write("q.jsonl", pairs(1))]), SFT)


def test_a_source_has_settings_of_its_own(write):
    first = write("a.jsonl", [{"q": f"Q{i}", "a": f"A{i}"} for i in range(10)])
    second = write("b.jsonl", [*pairs(6), {"prompt": "?", "completion": None}, *pairs(9)[6:]])
    mapped = {"path": first, "columns": {"prompt": "q", "completion": "a"}, "max_rows": 3}
    splits = load_splits(section([mapped, {"path": second, "on_bad_row": "skip"}]))
    assert splits.train == [{"prompt": f"Q{i}", "completion": f"A{i}"} for i in range(3)] + pairs(9)
    one, two = splits.report.by_source
    assert (one.rows_read, one.rows_train, one.skipped) == (3, 3, 0)
    assert (two.rows_read, two.rows_train, two.skipped) == (10, 9, 1)
    assert two.describe() == f"{second}: prompt and completion; 10 rows read, 9 to train on, 0 held out, 1 skipped"
    assert [name for name, _ in source_lines(splits.report)] == ["source", "source"]
    texts = load_splits(section([{"path": second, "format": "text", "columns": {"text": "prompt"}}]))
    assert texts.train[0] == {"text": "Question 0?"}
    with pytest.raises(UserError, match=r"has no column 'x' \(data\.source\.columns\.prompt\)"):
        rows_of({"path": first, "columns": {"prompt": "x"}})
    with pytest.raises(UserError, match=r"data\.source\.1\.format: the objective cannot use preference"):
        load_splits(section([first, {"path": second, "format": "preference"}], columns={"prompt": "q"}), SFT)
    with pytest.raises(
        UserError, match=r"b\.jsonl, line 7: completion must be text, found null\. \(data\.on_bad_row: skip"
    ):
        rows_of([mapped, second])


def test_the_same_file_may_be_read_in_two_ways_but_not_twice(write):
    path = write("a.jsonl", [{"prompt": "p", "completion": "c", "other": "o"}])
    twice = [path, {"path": path, "columns": {"completion": "other"}}]
    assert rows_of(twice) == [{"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": "o"}]
    assert rows_of([path, path]) == rows_of(path)
    with pytest.raises(UserError, match=r"data\.eval_source: .*a\.jsonl is named in data\.source too"):
        load_splits(section(path, eval_source={"path": path, "max_rows": 1}))


def test_a_share_of_each_source_is_held_out(write):
    large = [{"prompt": f"L{i}", "completion": "c"} for i in range(200)]
    small = [{"prompt": f"S{i}", "completion": "c"} for i in range(20)]
    shared = [{"prompt": f"L{i}", "completion": "d"} for i in range(0, 200, 5)]
    sources = [write("l.jsonl", large), write("s.jsonl", small), write("x.jsonl", shared)]
    splits = load_splits(section(sources, eval_fraction=0.1))
    assert [part.rows_eval for part in splits.report.by_source][:2] == [20, 2]
    assert "of each source" in splits.report.split
    held, trained = ({prompt_key(row) for row in side} for side in (splits.eval, splits.train))
    assert not held & trained
    assert len(splits.train) + len(splits.eval) == 260
    assert load_splits(section(sources, eval_fraction=0.1)).digest == splits.digest
    assert load_splits(section(sources, eval_fraction=0.1, seed=1)).digest != splits.digest


def test_sources_of_a_few_rows_share_one_draw(write):
    files = [write(f"{i}.txt", f"Document {i}") for i in range(20)]
    splits = load_splits(section(files, eval_fraction=0.1))
    assert (len(splits.train), len(splits.eval)) == (18, 2)
    with pytest.raises(UserError, match=r"leaves 2 rows to train on and 0 held out of 2 sources"):
        load_splits(section([write("a.txt", "same"), write("b.txt", "same")], eval_fraction=0.1))


def test_built_in_data_beside_files(write):
    own = write("own.jsonl", [{"text": f"A document of my own, number {i}."} for i in range(30)])
    splits = load_splits(section([{"path": "stdlib-text", "max_rows": 50}, own], eval_fraction=0.1))
    built_in, files = splits.report.by_source
    assert (built_in.rows_train, files.rows_train, files.rows_eval) == (50, 27, 3)
    assert built_in.rows_eval > 20 and "whole modules" in splits.report.split
    alone = load_splits(section("stdlib-text", eval_fraction=0.1))
    assert splits.eval[: built_in.rows_eval] == alone.eval  # the same modules as without the files
    capped = load_splits(section(["stdlib-text", own], eval_fraction=0.1, max_rows=40, max_eval_rows=10))
    assert (len(capped.train), len(capped.eval)) == (40, 10)
    assert all(part.rows_train for part in capped.report.by_source)  # a sample of all, not the first
    with pytest.raises(UserError, match=r"data\.source\.0\.columns: stdlib-text has no columns"):
        load_splits(section([{"path": "stdlib-text", "columns": {"text": "x"}}, own]))


def test_limits_over_several_files_take_the_first_rows(write):
    a, b, c = (write(f"{name}.jsonl", [{"text": f"{name}{i}"} for i in range(6)]) for name in "abc")
    splits = load_splits(section([a, b, c], max_rows=8))
    assert [row["text"] for row in splits.train] == [*(f"a{i}" for i in range(6)), "b0", "b1"]
    assert [part.not_read for part in splits.report.by_source] == ["", "", "not read, as data.max_rows was reached"]
    assert splits.report.sources == [a, b]


# Weights


def test_weights_give_a_mixture(write):
    a = write("a.jsonl", [{"text": f"a{i}"} for i in range(90)])
    b = write("b.jsonl", [{"text": f"b{i}"} for i in range(10)])
    assert load_splits(section([a, b])).mixture is None
    splits = load_splits(section([{"path": a, "weight": 3}, b], eval_fraction=0.1))
    mixture = splits.mixture
    assert mixture is not None and mixture.sizes == [81, 9] and mixture.rows_per_epoch == [68, 22]
    texts = [splits.train[place]["text"] for place in mixture.epoch(0)]
    assert sum(text.startswith("a") for text in texts) == 68 and sum(text.startswith("b") for text in texts) == 22
    assert "22 an epoch" in splits.report.by_source[1].describe()
    small = load_splits(section([{"path": a, "weight": 3.0}, {"path": b, "weight": 1}], epoch_rows=40)).mixture
    assert small is not None and small.rows_per_epoch == [30, 10]
    both = [{"path": a, "weight": 1}, {"path": b, "weight": 1}]
    assert {row["text"][0] for row in rows_of(both, max_rows=20)} == {"a", "b"}  # a sample, not the first
    with pytest.raises(UserError, match=r"data\.source\.1\.weight: .*b\.jsonl would give no row to an epoch of 100"):
        load_splits(section([a, {"path": b, "weight": 1e-6}]))
