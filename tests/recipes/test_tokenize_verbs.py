"""`anyformer tokenizer` and `anyformer tokenize` as commands."""

import json
import re

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from anyformer.recipes.errors import UserError
from anyformer.recipes.shards import TokenShards
from anyformer.scripts.cli import app

ONE = ("--column", "body", "--workers", 1)
TEXTS = ["the cat sat on the mat " * 4, "the dog sat on the log", "größer 猫", "one two three"]


def run(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code in (0, 2), done.exception
    return done.exit_code, done.output


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_from_texts_to_shards(tmp_path, source, kind):
    tokenizer, shards = tmp_path / "tokenizer", tmp_path / "shards"
    status, said = run(
        "tokenizer", source, tokenizer, "--kind", kind, "--vocab-size", 300, "--special", "bos", "--column", "body"
    )
    assert status == 0 and re.search(rf"^{kind}, \d+ tokens from 3 documents in ", said)
    assert re.search(r"^\d\.\d\d bytes a token on 1 documents that were held out\.$", said, re.MULTILINE)
    opened = AutoTokenizer.from_pretrained(tokenizer)
    assert f" {len(opened)} tokens" in said and opened.bos_token == "<s>"
    status, said = run(
        "tokenize", source, shards, "--tokenizer", tokenizer, "--column", "body", "--workers", 1, "--verify"
    )
    found = TokenShards(shards)
    assert status == 0 and f"4 documents, {len(found)} tokens (uint16) in 1 shard: {shards}" in said
    assert "1 shards have the sizes and checksums in index.json." in said
    assert f"{sum(len(text.encode()) for text in TEXTS) / len(found):.2f} bytes a token" in said
    assert [opened.decode(found.document(i)[:-1]) for i in range(4)] == TEXTS


def test_a_vocabulary_that_the_texts_do_not_fill_is_told(tmp_path, source):
    said = run("tokenizer", source, tmp_path / "out", "--vocab-size", 5000, "--column", "body")[1]
    assert "The texts hold no more than these; 5,000 were asked for." in said


def test_built_in_texts_and_their_summary(tmp_path, monkeypatch):
    from anyformer.recipes.data.builtin import stdlib_text

    text = tmp_path / "lib"
    text.mkdir()
    for name in ("a", "b"):
        (text / f"{name}.py").write_text(f"{name} = 1\n", encoding="utf-8")
    load = stdlib_text.load
    monkeypatch.setattr("anyformer.recipes.data.documents.BUILT_IN", _with_load(lambda: load(text)))
    status, said = run("tokenize", "stdlib-text", tmp_path / "out", "--tokenizer", "builtin:bytes", "--workers", 1)
    assert status == 0 and "2 documents, 14 tokens" in said
    assert [source["documents"] for source in TokenShards(tmp_path / "out").index.sources] == [2]


def _with_load(load):
    from dataclasses import replace

    from anyformer.recipes.data.builtin import BUILT_IN

    return BUILT_IN | {"stdlib-text": replace(BUILT_IN["stdlib-text"], load=load)}


def test_verification_by_itself(tmp_path, source):
    out = tmp_path / "out"
    arguments = ("tokenize", source, out, "--tokenizer", "builtin:bytes", "--column", "body", "--workers", 1)
    assert run(*arguments)[0] == 0
    assert run("tokenize", out, "--verify") == (
        0,
        f"{out}: 1 shards have the sizes and checksums in index.json.\n",
    )
    raw = bytearray((out / "00000.tokens").read_bytes())
    raw[7] ^= 1
    (out / "00000.tokens").write_bytes(raw)
    status, said = run("tokenize", out, "--verify")
    assert status == 2 and "00000.tokens: is damaged: its SHA-256 is not the one in the index" in said
    status, said = run(*arguments)
    assert status == 2 and "out exists already: choose another folder, or give --overwrite" in said
    assert run(*arguments, "--overwrite", "--verify")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tokenize", "SOURCE"), "name the texts and then the folder to write"),
        (("tokenizer", "SOURCE"), "name the texts and then the folder to write"),
        (("tokenize", "SOURCE", "OUT"), "--tokenizer is missing"),
        (
            ("tokenize", "SOURCE", "OUT", "--tokenizer", "/nowhere"),
            "no tokenizer can be read from '/nowhere': there is no such file",
        ),
        (
            ("tokenize", "SOURCE", "OUT", "--tokenizer", "builtin:bytes"),
            r"line 1: has no column 'text' \(--column\): found",
        ),
        (("tokenizer", "SOURCE", "OUT"), r"line 1: has no column 'text' \(--column\): found body"),
        (("tokenizer", "nothing.jsonl", "OUT"), "SOURCE: no file matches 'nothing.jsonl'"),
        (
            ("tokenizer", "stdlib-txt", "OUT"),
            r"no file matches 'stdlib-txt'.* Built-in data sets of texts: stdlib-text",
        ),
        (("tokenizer", "SOURCE", "OUT", "--special", "eos="), "--special: a token is empty"),
        (("tokenize", "SOURCE", "--verify", "--workers", "0"), "Invalid value for '--workers'"),
    ],
)
def test_mistakes(tmp_path, source, arguments, said):
    names = {"SOURCE": source, "OUT": tmp_path / "out"}
    try:
        status, output = run(*(names.get(argument, argument) for argument in arguments))
    except UserError as error:
        status, output = 2, str(error)
    assert status == 2 and re.search(said, output), output
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_a_model_beside_its_tokenizer_is_not_replaced(tmp_path, source):
    out = tmp_path / "out"
    arguments = ("tokenizer", source, out, "--column", "body", "--vocab-size", 300)
    assert run(*arguments)[0] == 0 and run(*arguments, "--overwrite")[0] == 0
    (out / "model.safetensors").write_bytes(b"")
    status, said = run(*arguments, "--overwrite")
    assert status == 2 and "out holds something else and is not replaced" in said


def test_what_a_killed_run_left_is_told(tmp_path, source):
    (tmp_path / ".out.partial-abc").mkdir()
    said = run(
        "tokenize", source, tmp_path / "out", "--tokenizer", "builtin:bytes", "--column", "body", "--workers", 1
    )[1]
    assert ".out.partial-abc was left by a run that was killed, or belongs to one that still works" in said
