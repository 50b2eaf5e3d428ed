"""Streams: the same rows as from memory, read anew each time, and never all at once."""

import functools
import json
import subprocess
import sys

import pytest
from data_rows import SFT, load_splits, pairs, section, write_rows

from anyformer.recipes.data import RowStream, prompt_key
from anyformer.recipes.errors import UserError


@pytest.fixture
def write(tmp_path):
    return functools.partial(write_rows, tmp_path)


def test_a_stream_gives_the_rows_of_memory_each_time(write):
    path = write("a.jsonl", pairs(200))
    stream = load_splits(section(path, streaming=True), SFT).train
    assert isinstance(stream, RowStream)
    assert list(stream) == list(stream) == pairs(200) and len(stream) == 200
    other = load_splits(section(path), SFT)
    assert other.train == list(stream)


def test_prompts_are_held_out_by_their_hash(write):
    rows = [{"prompt": f"Question {i % 300}?", "completion": f"Answer {i}."} for i in range(600)]
    whole = load_splits(section(write("a.jsonl", rows), streaming=True, eval_fraction=0.1))
    train = list(whole.train)
    held, trained = ({prompt_key(row) for row in side} for side in (whole.eval, train))
    assert not held & trained and len(train) + len(whole.eval) == 600
    assert 15 <= len(held) <= 45  # 300 prompts at 0.1: mean 30, deviation 5.2
    # The same prompts, however many rows there are and wherever they stand.
    parts = [write("b.jsonl", rows[300:]), write("c.jsonl", rows[:300])]
    again = load_splits(section(parts, streaming=True, eval_fraction=0.1))
    assert {prompt_key(row) for row in again.eval} == held
    assert "chosen by their hash and seed 0" in whole.report.split
    other = load_splits(section(write("a.jsonl", rows), streaming=True, eval_fraction=0.1, seed=1))
    assert {prompt_key(row) for row in other.eval} != held


def test_held_out_rows_are_a_bounded_sample(write):
    path = write("a.jsonl", pairs(400))
    few = load_splits(section(path, streaming=True, eval_fraction=0.5, max_eval_rows=20))
    every = load_splits(section(path, streaming=True, eval_fraction=0.5))
    assert len(few.eval) == 20 and all(row in every.eval for row in few.eval)
    assert few.eval == [row for row in every.eval if row in few.eval]
    assert list(few.train) == list(every.train) and "a sample of" in few.report.split
    assert few.eval != every.eval[:20]


def test_limits_stop_the_reading(write):
    good = "".join(json.dumps(row) + "\n" for row in pairs(30))
    path = write("a.jsonl", good + "{broken")
    splits = load_splits(section(path, streaming=True, max_rows=10))
    assert list(splits.train) == pairs(10) and splits.report.rows_read == 10
    other = write("b.jsonl", pairs(30)[20:])
    splits = load_splits(section([{"path": path, "max_rows": 4}, other], streaming=True, max_rows=7))
    assert list(splits.train) == [*pairs(4), *pairs(23)[20:]]
    with pytest.raises(UserError, match=r"a\.jsonl, line 31: broken JSON"):
        load_splits(section(path, streaming=True))
    skipped = load_splits(section(path, streaming=True, on_bad_row="skip"))
    assert list(skipped.train) == pairs(30) == list(skipped.train)
    assert skipped.report.rows_skipped == 1  # counted once, however often it is read


def test_eval_source_and_overlap(write):
    a, b = write("a.jsonl", pairs(5)), write("b.jsonl", pairs(8)[4:])
    splits = load_splits(section(a, eval_source=b, streaming=True))
    assert splits.eval == pairs(8)[4:] and list(splits.train) == pairs(5)
    assert splits.report.warnings == [
        "1 prompts of the held-out rows are also trained on: their loss says little about new prompts"
    ]


def test_weights_and_built_in_data_in_a_stream(write):
    path = write("a.jsonl", [{"text": f"Document {i}"} for i in range(40)])
    sources = [{"path": "stdlib-text", "max_rows": 20, "weight": 1}, {"path": path, "weight": 3}]
    splits = load_splits(section(sources, streaming=True, eval_fraction=0.1))
    rows = list(splits.train)
    assert rows == list(splits.train) and isinstance(splits.train, RowStream)
    assert splits.mixture is not None and splits.mixture.sizes == splits.train.sizes == [20, len(rows) - 20]
    assert not {prompt_key(row) for row in splits.eval} & {prompt_key(row) for row in rows}
    parts = [list(part) for part in splits.train_by_source]
    assert parts == [rows[:20], rows[20:]]
    limited = load_splits(section(sources, streaming=True, max_rows=30))
    assert [len(list(part)) for part in limited.train_by_source] == [20, 10]
    memory = load_splits(section(sources, eval_fraction=0.1))
    assert [row for part in memory.train_by_source for row in part] == memory.train


def test_a_source_that_changes_is_found(write, tmp_path):
    path = write("a.jsonl", pairs(10))
    splits = load_splits(section(path, streaming=True))
    write("a.jsonl", pairs(9))
    with pytest.raises(UserError, match=r"gives 9 rows to train on, and gave 10 when it was first read"):
        list(splits.train)
    write("a.jsonl", pairs(11))
    with pytest.raises(UserError, match=r"gives 11 rows"):
        list(splits.train)
    code = write("mine.py", "count = 3\ndef rows():\n    return ({'text': str(i)} for i in range(count))\n")
    assert [row["text"] for row in load_splits(section(f"{code}:rows", streaming=True)).train] == ["0", "1", "2"]


def test_a_source_that_gives_other_rows_is_found(write):
    path = write("a.jsonl", pairs(10))
    splits = load_splits(section(path, streaming=True))
    assert list(splits.train) == list(splits.train) == pairs(10)
    write("a.jsonl", [*pairs(9), {"prompt": "p", "completion": "c"}])
    with pytest.raises(UserError, match=r"gives other rows to train on than when it was first read"):
        list(splits.train)


def test_the_digest_follows_rows_and_sides(write):
    path = write("a.jsonl", pairs(40))
    digest = load_splits(section(path, streaming=True, eval_fraction=0.2)).digest
    assert load_splits(section(path, streaming=True, eval_fraction=0.2)).digest == digest
    assert load_splits(section(path, streaming=True, eval_fraction=0.3)).digest != digest
    write("a.jsonl", [*pairs(39), {"prompt": "Question 39?", "completion": "Other."}])
    assert load_splits(section(path, streaming=True, eval_fraction=0.2)).digest != digest


def test_nothing_left(write):
    with pytest.raises(
        UserError, match=r"leaves 1 rows to train on and 0 held out: of a stream, prompts are chosen by"
    ):
        load_splits(section(write("a.jsonl", pairs(1)), streaming=True, eval_fraction=0.01))
    with pytest.raises(UserError, match=r"data\.source: no usable row in .*b\.jsonl: 1 skipped, the first at"):
        load_splits(section(write("b.jsonl", "{"), streaming=True, on_bad_row="skip"))


MEASURE = """
import resource, sys
sys.path.insert(0, {tests!r})
from data_rows import section
from anyformer.recipes.data import load_splits

load_splits(section({small!r}, streaming=True, eval_fraction=0.1))  # what imports and buffers take
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
splits = load_splits(section({large!r}, streaming=True, eval_fraction=0.1, max_eval_rows=100))
count = sum(1 for _ in splits.train)
assert count == len(splits.train)
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, request, kind):
    rows = 100_000 if kind == "jsonl" else 50_000  # 200 MB and 100 MB
    for name, count in (("small", 500), ("large", rows)):
        _write_large(tmp_path / f"{name}.{kind}", kind, count)
    paths = {name: str(tmp_path / f"{name}.{kind}") for name in ("small", "large")}
    code = MEASURE.format(tests=str(request.path.parent), **paths)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    count, grown = map(int, done.stdout.split())
    assert 0.85 * rows < count < 0.95 * rows
    assert grown < 60, f"{grown} MB"


def _write_large(path, kind, count):
    words = "x" * 2000
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema({"text": pa.string()})
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for start in range(0, count, 25_000):  # 50 MB a row group
                texts = [f"{i} {words}" for i in range(start, min(start + 25_000, count))]
                writer.write_table(pa.table({"text": texts}, schema))
        return
    with path.open("w", encoding="utf-8") as file:
        file.write("text\n" if kind == "csv" else "")
        for i in range(count):
            file.write(f"{i} {words}\n" if kind == "csv" else f'{{"text": "{i} {words}"}}\n')
