"""A folder of token shards: what is in it, and what is refused."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from anyformer.recipes.data.documents import Document
from anyformer.recipes.errors import UserError
from anyformer.recipes.models import read_tokenizer
from anyformer.recipes.shards import TokenShards, encode, fingerprint, is_token_folder, write_shards
from anyformer.recipes.shards.writer import ShardWriter
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer

TEXTS = [" ".join(["one", "two", "three", "the cat sat"][i % 4 :] * (1 + i % 5)) + str(i) for i in range(40)]
TEXTS += ["größer, 猫が座った 👩‍👩‍👧", "a\x00b", "the cat sat on the mat, the dog sat on the log " * 20, "five"]


def expected_documents(tokenizer, texts):
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# What is written


def test_the_files_are_as_documented(shards_of, tokenizer):
    """Read as another program would, from the description alone."""
    folder = shards_of(TEXTS).folder
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    assert (index["format"], index["version"], index["byte_order"]) == ("anyformer-tokens", 1, "little")
    assert index["dtype"] == "uint16" and index["eos_token_id"] == tokenizer.eos_token_id
    found = []
    for shard in index["shards"]:
        raw = {kind: (folder / shard[f"{kind}_file"]).read_bytes() for kind in ("tokens", "documents")}
        assert all(hashlib.sha256(raw[kind]).hexdigest() == shard[f"{kind}_sha256"] for kind in raw)
        tokens, offsets = np.frombuffer(raw["tokens"], "<u2"), np.frombuffer(raw["documents"], "<u8")
        assert len(tokens) == shard["tokens"] == offsets[-1] and len(offsets) == shard["documents"] + 1
        found += [tokens[a:b].tolist() for a, b in pairwise(offsets)]
    assert found == expected_documents(tokenizer, TEXTS)
    assert index["documents"] == len(TEXTS) and index["tokens"] == sum(map(len, found))
    assert [source["documents"] for source in index["sources"]] == [len(TEXTS)]
    again = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert again(TEXTS[40])["input_ids"] == tokenizer(TEXTS[40])["input_ids"]


def test_a_shard_ends_before_it_is_too_long_and_a_longer_document_has_one_to_itself(shards_of, tokenizer):
    shards = shards_of(TEXTS, shard_tokens=100)
    lengths = [len(ids) for ids in expected_documents(tokenizer, TEXTS)]
    expected, used = [[0, 0]], 0  # by hand: documents and tokens of each shard
    for length in lengths:
        if used and used + length > 100:
            expected.append([0, 0])
            used = 0
        used += length
        expected[-1] = [expected[-1][0] + 1, used]
    assert max(lengths) > 100 and [[s.documents, s.tokens] for s in shards.index.shards] == expected


def test_batches_may_be_cut_anywhere(tmp_path):
    """Documents come out as they went in, whatever comes in one call."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 200)
    tokens = rng.integers(0, 60000, lengths.sum())
    before = None
    for cuts in ([], [1, 2, 3], sorted(rng.choice(199, 40, replace=False) + 1)):
        folder = tmp_path / str(len(cuts))
        folder.mkdir()
        writer = ShardWriter(folder, "uint16", 64)
        for part in np.split(np.arange(200), cuts):
            begin = int(lengths[: part[0]].sum())
            writer.add(tokens[begin : begin + int(lengths[part].sum())], lengths[part])
        shards, digest = writer.finish()
        files = contents(folder)
        assert (writer.documents, writer.tokens) == (200, len(tokens))
        assert b"".join(files[s.tokens_file] for s in shards) == tokens.astype("<u2").tobytes()
        assert before in (None, (files, digest))
        before = files, digest


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_writes_the_same_bytes(shards_of, workers, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_DOCUMENTS", 3)
    alone = contents(shards_of(TEXTS, "same").folder)
    assert contents(shards_of(TEXTS, "same", workers=workers, overwrite=True).folder) == alone


def test_the_digest_is_of_the_documents_and_not_of_the_shards(shards_of):
    digests = {shards_of(TEXTS, f"s{size}", shard_tokens=size).index.digest for size in (50, 1000)}
    others = {shards_of(TEXTS[:-1], "less").index.digest, shards_of([*TEXTS[:-2], "five", TEXTS[-2]]).index.digest}
    assert len(digests) == 1 and len(digests | others) == 3


def test_a_text_that_ends_with_the_end_token_gets_no_second_one(shards_of, tokenizer):
    shards = shards_of([f"one{tokenizer.eos_token}"])
    assert shards.document(0).tolist() == [*tokenizer("one")["input_ids"], tokenizer.eos_token_id]


def test_a_document_that_becomes_nothing_is_kept_and_counted(shards_of):
    """So that the number of a document is that of its text."""
    silent = byte_tokenizer()
    silent.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    shards = shards_of(["xxx", "a", "x"], by=silent)
    assert [shards.document(i).tolist() for i in range(3)] == [[2], [ord("a") + 4, 2], [2]]
    assert shards.index.empty_documents == 2


@pytest.mark.parametrize(("size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_large_vocabularies_take_wider_tokens(shards_of, size, dtype):
    raw = Tokenizer(models.WordLevel({"</s>": 0} | {f"w{i}": i for i in range(1, size)}, unk_token="</s>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    shards = shards_of([f"w{size - 1} w1"], by=words)
    assert shards.index.dtype == dtype and shards.document(0).tolist() == [size - 1, 1, 0]


def test_tokenizers_without_a_fast_backend(shards_of):
    class Slow:
        """As much as is needed of a tokenizer in Python."""

        is_fast, eos_token_id = False, 1

        def __call__(self, texts):
            return {"input_ids": [[len(word) + 2 for word in text.split()] for text in texts]}

        def get_vocab(self):
            return {str(i): i for i in range(50)}

        def save_pretrained(self, folder):
            folder.mkdir()

    assert shards_of(["a bb ccc", "dddd"], by=Slow()).read(0, 6).tolist() == [3, 4, 5, 1, 6, 1]


def test_only_so_many_documents_are_in_hand(tokenizer, monkeypatch):
    """Memory follows the batches in work, not the corpus."""
    monkeypatch.setattr(encode, "BATCH_DOCUMENTS", 2)
    taken = 0

    def documents():
        nonlocal taken
        for i in range(200):
            taken += 1
            yield Document(f"one {i}", len(f"one {i}"))

    found = encode.encode(documents(), encode.Encoder(tokenizer, "uint16"), 2)
    for done, _ in enumerate(found, 1):
        assert taken <= 2 * (done + encode._IN_HAND * 2 + 1) + 1
    assert done == 100 == taken // 2


# What is read


def test_random_access_opens_only_the_shard_that_is_asked_for(shards_of, tokenizer):
    shards = shards_of(TEXTS)
    assert len(shards.index.shards) > 5
    expected = expected_documents(tokenizer, TEXTS)
    assert shards.document(30).tolist() == expected[30]
    assert len(shards._maps) == 2  # one pair of files
    stream = [token for ids in expected for token in ids]
    assert len(shards) == len(stream) and shards.documents == len(TEXTS)
    for start, count in ((0, len(stream)), (95, 20), (len(stream) - 1, 1), (7, 0)):
        assert shards.read(start, count).tolist() == stream[start : start + count]
    for start, count in ((-1, 2), (len(stream), 1)):
        with pytest.raises(IndexError):
            shards.read(start, count)
    assert shards.starts(np.arange(len(TEXTS) + 1)).tolist() == np.cumsum([0, *map(len, expected)]).tolist()


def damage(path, how):
    raw = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": raw[:-2], "longer": raw + b"\0\0"}[how])


@pytest.mark.parametrize("name", ["00001.tokens", "00002.documents"])
@pytest.mark.parametrize(
    ("how", "said"),
    [("cut", "is cut short: "), ("longer", "is too long: "), ("missing", "is missing or cannot be read")],
)
def test_a_file_of_another_size_is_named_when_the_folder_is_opened(shards_of, name, how, said):
    folder = shards_of(TEXTS).folder
    damage(folder / name, how)
    with pytest.raises(UserError, match=rf"{name}: {said}"):
        TokenShards(folder)
    assert is_token_folder(folder)


@pytest.mark.parametrize("name", ["00001.tokens", "00000.documents"])
def test_a_flipped_bit_is_found_by_verification(shards_of, name):
    shards = shards_of(TEXTS)
    shards.verify()
    raw = bytearray((shards.folder / name).read_bytes())
    raw[len(raw) // 2] ^= 4
    (shards.folder / name).write_bytes(raw)
    with pytest.raises(UserError, match=rf"{name}: is damaged: its SHA-256"):
        TokenShards(shards.folder).verify()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:50], "index.json: is damaged: no JSON"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version 2 of the format; this program reads 1"),
        (lambda text: text.replace('"eos_token_id"', '"eos"'), "is damaged: 'eos_token_id'"),
        (lambda text: text.replace('"eos_token_id": ', '"eos_token_id": 9999'), "its figures do not add up"),
        (lambda text: text.replace('"documents": 44', '"documents": 45', 1), "its figures do not add up"),
        (lambda text: text.replace("anyformer-tokens", "other"), "its format is not 'anyformer-tokens'"),
    ],
    ids=["cut", "version", "key", "end token", "sum", "format"],
)
def test_a_damaged_index_is_refused(shards_of, change, said):
    path = shards_of(TEXTS).folder / "index.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(change(text), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    with pytest.raises(UserError, match=said):
        TokenShards(path.parent)


def test_other_folders_are_not_taken_for_shards(tmp_path):
    (tmp_path / "index.json").write_text('{"format": "else"}', encoding="utf-8")
    assert not is_token_folder(tmp_path) and not is_token_folder(tmp_path / "none") and not is_token_folder(["a"])
    with pytest.raises(UserError, match=r"is no folder of token shards: it has no index\.json"):
        TokenShards(tmp_path / "none")


# Fingerprints


def test_a_tokenizer_keeps_its_fingerprint_through_a_folder(tokenizer, tiny_bert, tmp_path):
    found = set()
    for number, one in enumerate((tokenizer, byte_tokenizer(), AutoTokenizer.from_pretrained(tiny_bert))):
        one.save_pretrained(tmp_path / str(number))
        again = AutoTokenizer.from_pretrained(tmp_path / str(number))
        assert fingerprint(again) == fingerprint(one)
        found.add(fingerprint(one))
        one(["a", "a b"], padding=True, truncation=True, max_length=5)  # sets the backend's padding
        assert fingerprint(one) in found
    assert len(found) == 3


def test_the_fingerprint_of_a_gguf_tokenizer_lasts(smollm2_gguf, tmp_path):
    one = read_tokenizer(str(smollm2_gguf))
    one.save_pretrained(tmp_path)
    assert fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == fingerprint(one)


def test_a_change_of_the_tokens_changes_the_fingerprint(tiny_checkpoint):
    one = AutoTokenizer.from_pretrained(tiny_checkpoint)
    before = fingerprint(one)
    one.add_tokens(["<new>"])
    assert fingerprint(one) != before


# What is refused


def refused(sources, target, tokenizer, said, **options):
    with pytest.raises(UserError, match=said):
        write_shards([str(source) for source in sources], target, tokenizer, workers=1, **options)
    assert not list(target.parent.glob(f".{target.name}.*"))


def test_faults_of_rows_are_told_with_their_place(tmp_path, texts_of, tokenizer):
    out = tmp_path / "out"
    file = tmp_path / "rows.jsonl"
    for raw, said in (
        (b"", "rows.jsonl: the file is empty"),
        (
            b'{"text": "a"}\n{"text": "gr\xfc\xdf"}\n',
            "rows.jsonl, line 2: byte 0xfc at byte 13 of the line is not UTF-8",
        ),
        (b'{"text": "a"}\n{"text": "b"\n', "rows.jsonl, line 2: broken JSON"),
        (b'{"text": "  "}\n', "rows.jsonl, line 1: text is empty"),
        (b'{"text": "\\ud83d"}\n', "rows.jsonl, line 1: text holds half of a surrogate pair"),
        (b'{"body": "a"}\n', r"rows.jsonl, line 1: has no column 'text' \(--column\): found body"),
    ):
        file.write_bytes(raw)
        refused([file], out, tokenizer, said)
        assert not out.exists()
    refused([tmp_path / "none.jsonl"], out, tokenizer, "SOURCE: no file matches")
    refused(["gsm8k"], out, tokenizer, "SOURCE: gsm8k is prompt-completion, not text")


def test_bad_rows_can_be_left_out_but_not_all(tmp_path, tokenizer):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "one"}\n{"text": 3}\n{"text": "two"}\n')
    done = write_shards([str(file)], tmp_path / "out", tokenizer, workers=1, skip=True)
    assert (done.index.documents, done.skipped, done.text_bytes) == (2, 1, 6)
    file.write_bytes(b'{"text": 3}\n')
    said = "no document in .*: 1 rows left out, the first: .*rows.jsonl, line 1: text must be text, found a number"
    refused([file], tmp_path / "two", tokenizer, said, skip=True)
    assert not (tmp_path / "two").exists()


def test_sources_are_read_in_the_order_given_each_once(tmp_path, texts_of, tokenizer):
    names = [texts_of([name], f"{name}.jsonl") for name in ("b", "a")]
    text = tmp_path / "c.txt"
    text.write_text("c\nc", encoding="utf-8")
    sources = [str(names[0]), str(tmp_path / "*.jsonl"), str(text)]
    shards = TokenShards(write_shards(sources, tmp_path / "out", tokenizer, workers=1) and tmp_path / "out")
    assert [tokenizer.decode(shards.document(i)[:-1]) for i in range(3)] == ["b", "a", "c\nc"]
    assert [Path(source["name"]).name for source in shards.index.sources] == ["b.jsonl", "a.jsonl", "c.txt"]


def test_a_folder_that_exists_is_replaced_on_request_alone(shards_of, texts_of, tmp_path, tokenizer):
    before = contents(shards_of(TEXTS, "out").folder)
    source, out = texts_of(["other"]), tmp_path / "out"
    refused([source], out, tokenizer, "out exists already: choose another folder, or give --overwrite")
    source.write_bytes(b"{")
    refused([source], out, tokenizer, "broken JSON", overwrite=True)
    assert contents(out) == before
    write_shards([str(texts_of(["other"]))], out, tokenizer, workers=1, overwrite=True)
    assert TokenShards(out).documents == 1 and not list(tmp_path.glob(".out.*"))
    (tmp_path / "plain").mkdir()
    assert out.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_nothing_but_shards_is_ever_replaced(tmp_path, texts_of, tokenizer):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("…", encoding="utf-8")
    refused([texts_of(["a"])], mine, tokenizer, "mine holds something else and is not replaced", overwrite=True)
    assert (mine / "thesis.tex").exists()


def test_a_full_disk_leaves_nothing(tmp_path, texts_of, tokenizer, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ShardWriter, "add", full)
    refused([texts_of(["a"])], tmp_path / "out", tokenizer, "out cannot be written: No space left on device")
    assert not (tmp_path / "out").exists()


# Killed


def children(pid):
    return [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]


def wait_for(what, seconds=90):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.05)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")
@pytest.mark.parametrize("replaces", [False, True])
def test_a_killed_run_leaves_no_half_folder_and_no_process(tmp_path, shards_of, tiny_checkpoint, replaces):
    """Killed outright while it waits for more rows, with shards on the disk already."""
    out, pipe = tmp_path / "out", tmp_path / "rows.jsonl"
    before = contents(shards_of(TEXTS, "out").folder) if replaces else None
    os.mkfifo(pipe)
    command = [sys.executable, "-c", "from anyformer.scripts.cli import main; main()", "tokenize", str(pipe), str(out)]
    command += ["--tokenizer", str(tiny_checkpoint), "--workers", "2", "--shard-tokens", "20000", "--overwrite"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with pipe.open("w", encoding="utf-8") as stream:
            for _ in range(300):
                stream.write(json.dumps({"text": "the cat sat on the mat " * 1500}) + "\n")
            stream.flush()
            wait_for(lambda: list(tmp_path.glob(".out.partial-*/00001.tokens")))
            workers = wait_for(lambda: children(run.pid))
            run.send_signal(signal.SIGKILL)
            run.wait()
            assert (contents(out) if replaces else out.exists()) == (before or False)
            wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    finally:
        run.kill()
        run.wait()


def test_progress_is_told_batch_by_batch(shards_of, monkeypatch, tokenizer):
    monkeypatch.setattr(encode, "BATCH_DOCUMENTS", 15)
    told = []
    shards = shards_of(TEXTS, progress=lambda documents, tokens: told.append((documents, tokens)))
    lengths = np.cumsum([len(ids) for ids in expected_documents(tokenizer, TEXTS)])
    assert told == [(n, int(lengths[n - 1])) for n in (15, 30, 44)] and told[-1][1] == len(shards)
