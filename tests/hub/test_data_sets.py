"""Rows of data sets on the loopback Hub, through the real client and the library `datasets`."""

import io
import json

import pytest

from .conftest import Hub, run_python

PRELUDE = """
import json
from types import SimpleNamespace
from anyformer.recipes.data import load_splits
from anyformer.recipes.errors import UserError

def load(source, **changed):
    settings = dict(source=source, format="auto", columns={}, on_bad_row="error", max_rows=None, epoch_rows=None,
                    streaming=False, eval_source=None, eval_fraction=0.0, max_eval_rows=None, seed=0)
    return load_splits(SimpleNamespace(**settings | changed), ("messages", "prompt-completion", "text"))

def fault(source, **changed):
    try:
        load(source, **changed)
    except UserError as error:
        return str(error)
    return "none"

out = {}
"""
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def client(hub: Hub, code: str, **env: str):
    done = run_python(PRELUDE + code + "\nprint(json.dumps(out))", hub.env | env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(columns: dict) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


@pytest.fixture
def rows(hub: Hub):
    """`bob/rows`: splits train and test as JSONL; `bob/chats`: two configurations as Parquet."""
    train = [{"prompt": f"Question {i}?", "completion": f"Answer {i:02}"} for i in range(1, 9)]
    files = {"train.jsonl": lines(train), "test.jsonl": lines([{"prompt": "Test?", "completion": "Yes."}])}
    hub.server.add_files("datasets/bob/rows", files)
    card = (
        "---\nconfigs:\n- config_name: en\n  data_files: en.parquet\n- config_name: de\n  data_files: de.parquet\n---\n"
    )
    chats = {"README.md": card.encode(), "en.parquet": parquet({"messages": [CHAT]})}
    chats["de.parquet"] = parquet({"messages": [CHAT, CHAT[:1]], "day": [None, "2024-01-05"]})
    hub.server.add_files("datasets/bob/chats", chats)
    hub.server.add_files("datasets/bob/rows", {"train.jsonl": lines(train[:3])}, branch="small")
    return train


def test_rows_of_the_hub(hub: Hub, rows):
    out = client(
        hub,
        """
splits = load("hub:bob/rows")
out["train"], out["report"] = splits.train, splits.report.by_source[0].describe()
out["test"] = load({"hub": "bob/rows", "split": "test"}).train
out["first"] = load({"hub": "bob/rows", "split": "train[:2]"}).train
out["branch"] = load({"path": "hub:bob/rows", "revision": "small"}).train
out["config"] = load({"hub": "bob/chats", "config": "en"}).train
out["mixed"] = [len(row) for row in load([{"hub": "bob/chats", "config": "en"}, {"hub": "bob/chats", "config": "de",
    "on_bad_row": "skip"}]).train]
out["eval"] = len(load("hub:bob/rows", eval_source={"hub": "bob/rows", "split": "test"}).eval)
out["digests"] = [load("hub:bob/rows").digest, load("hub:bob/rows").digest,
    load({"hub": "bob/rows", "revision": "small"}).digest]
stream = load("hub:bob/rows", streaming=True).train
out["stream"], out["again"] = list(stream), list(stream)
out["limited"] = list(load("hub:bob/rows", streaming=True, max_rows=3).train)
""",
    )
    assert out["train"] == out["stream"] == out["again"] == rows
    assert out["report"] == "hub:bob/rows: prompt and completion; 8 rows read, 8 to train on, 0 held out"
    assert out["test"] == [{"prompt": "Test?", "completion": "Yes."}] and out["eval"] == 1
    assert out["first"] == rows[:2] and out["branch"] == out["limited"] == rows[:3]
    assert out["config"] == [{"messages": CHAT}] and out["mixed"] == [1, 1]
    assert out["digests"][0] == out["digests"][1] != out["digests"][2]


def test_faults_are_one_line_on_the_setting(hub: Hub, rows):
    hub.server.add_files("datasets/bob/gated", {"train.jsonl": lines(rows)})
    hub.server.repos["datasets/bob/gated"].gated = True
    hub.server.add_files("datasets/bob/nothing", {"notes.bin": b"x"})
    hub.server.add_files("datasets/bob/dates", {"train.jsonl": lines([{"text": "2024-01-05"}])})
    mixed = {"a.jsonl": lines([{"text": "2024-01-05"}]), "b.jsonl": lines([{"text": "hunter2"}])}
    hub.server.add_files("datasets/bob/mixed", mixed)
    out = client(
        hub,
        """
out["unknown"] = fault("hub:bob/none")
out["split"] = fault({"hub": "bob/rows", "split": "tset"})
out["stream_split"] = fault({"hub": "bob/rows", "split": "tset"}, streaming=True)
out["config"] = fault({"hub": "bob/chats", "config": "fr"})
out["no_config"] = fault("hub:bob/chats")
out["revision"] = fault({"hub": "bob/rows", "revision": "gone"})
out["gated"] = fault("hub:bob/gated")
out["nothing"] = fault("hub:bob/nothing")
out["dates"] = fault("hub:bob/dates")
out["mixed"] = fault("hub:bob/mixed")
out["row"] = fault({"hub": "bob/chats", "config": "de"})
""",
    )
    assert out["unknown"].startswith("data.source: hub:bob/none: no such data set on the Hub, or one that is private")
    assert out["split"] == out["stream_split"] == "data.source: hub:bob/rows: has no split 'tset'; it has train, test"
    assert out["config"] == "data.source: hub:bob/chats: has no configuration 'fr'; it has en, de"
    assert out["no_config"] == "data.source: hub:bob/chats: has several configurations: set config to one of en, de"
    assert out["revision"] == "data.source: hub:bob/rows: has no revision 'gone'"
    assert out["gated"].startswith("data.source: hub:bob/gated: is gated: ask for access on https://huggingface.co/")
    assert out["nothing"].startswith("data.source: hub:bob/nothing: holds no files that can be read")
    # Text that looks like a date is a timestamp to the library: refused, not turned back into some text.
    assert out["dates"].startswith("hub:bob/dates, split train, row 1: text must be text, found a timestamp, which")
    assert "if it is text on the Hub: download the file and give its path" in out["dates"]
    assert out["mixed"].startswith("data.source: hub:bob/mixed: is not one table") and "hunter2" not in out["mixed"]
    assert out["row"].startswith("hub:bob/chats, split train, row 2: messages must end with an assistant message")
    assert not any("\n" in text for text in out.values())


def test_without_a_way_to_the_hub(hub: Hub, rows):
    gone = client(hub, 'out["fault"] = fault("hub:bob/rows")', HF_ENDPOINT="http://127.0.0.1:9")
    assert gone["fault"].startswith("data.source: hub:bob/rows: the Hub cannot be reached")
    offline = client(hub, 'out["fault"] = fault("hub:bob/rows")', HF_HUB_OFFLINE="1")
    assert offline["fault"] == (
        "data.source: hub:bob/rows: is not on this machine, and HF_HUB_OFFLINE forbids to fetch it"
    )
    client(hub, 'load("hub:bob/rows")')
    kept = client(hub, 'out["rows"] = load("hub:bob/rows").train', HF_HUB_OFFLINE="1")
    assert kept["rows"] == rows  # from the library's own copy
