"""Folders of token shards for tests."""

import json

import pytest
from transformers import AutoTokenizer

from anyformer.recipes.shards import TokenShards, write_shards


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


def write_texts(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def texts_of(tmp_path):
    """A function: texts -> a JSONL file that holds them."""
    return lambda texts, name="texts.jsonl": write_texts(tmp_path / name, texts)


@pytest.fixture
def shards_of(tmp_path, texts_of, tokenizer):
    """A function: texts -> their folder of token shards."""

    def make(texts, name="shards", by=None, **options):
        options = {"workers": 1, "shard_tokens": 100} | options
        write_shards([str(texts_of(texts, f"{name}.jsonl"))], tmp_path / name, by or tokenizer, **options)
        return TokenShards(tmp_path / name)

    return make
