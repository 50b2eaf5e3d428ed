"""Tokenizers that are trained on texts."""

import json
import math
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from anyformer.recipes.data.documents import Document
from anyformer.recipes.errors import UserError
from anyformer.recipes.tokens import trained_tokenizer
from anyformer.recipes.tokens.byte_level import alphabet, byte_level
from anyformer.recipes.tokens.trained_tokenizer import special_tokens, train_tokenizer
from anyformer.recipes.tokens.unigram import unigram_pieces

TEXT = "the cat sat on the mat, the dog sat on the log; größere Katzen größer als große 猫が座った 猫が\n"
TEXTS = [TEXT * 3 + " ".join(["counting", str(i), "one two three"][i % 3 :]) for i in range(60)]
KINDS = ("bpe", "unigram")


def documents(texts):
    return [Document(text, len(text.encode("utf-8"))) for text in texts]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Kind -> the tokenizer of TEXTS as others open it."""
    folder, found = tmp_path_factory.mktemp("tokenizers"), {}
    for kind in KINDS:
        train_tokenizer(documents(TEXTS), kind, 310, ["mask", "<|user|>"]).tokenizer.save_pretrained(folder / kind)
        found[kind] = AutoTokenizer.from_pretrained(folder / kind)
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("ab \n\t<>/s|é猫\u200d👩") | st.binary().map(
    lambda raw: raw.decode("latin-1")
))  # fmt: skip
def test_any_text_comes_back(trained, kind, text):
    tokenizer = trained[kind]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_holds_a_fast_tokenizer_with_its_special_tokens(trained, kind):
    tokenizer = trained[kind]
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and len(tokenizer) == 310
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.mask_token) == ("<pad>", "</s>", "<mask>")
    assert tokenizer.bos_token is None and tokenizer.convert_tokens_to_ids("<|user|>") == 3
    assert tokenizer("a<|user|>b</s>")["input_ids"][1::2] == [3, tokenizer.eos_token_id]
    assert len(tokenizer.tokenize("the cat sat")) == 3  # whole words were learned
    assert sorted(tokenizer.get_vocab().values()) == list(range(310))


SCRIPT = """
import json, sys
from anyformer.recipes.tokens.trained_tokenizer import _bpe, _unigram
print({"bpe": _bpe, "unigram": _unigram}[sys.argv[1]](json.load(sys.stdin), ["<pad>", "</s>"], 308).to_str())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_every_process_learns_the_same(kind):
    """Hash tables have other keys in each process and threads end in another order."""
    here = {"bpe": trained_tokenizer._bpe, "unigram": trained_tokenizer._unigram}[kind](TEXTS, ["<pad>", "</s>"], 308)
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": "true"}
        command = [sys.executable, "-c", SCRIPT, kind]
        done = subprocess.run(
            command, input=json.dumps(TEXTS), check=True, capture_output=True, text=True, env=environment
        )
        assert done.stdout == here.to_str() + "\n" and here.get_vocab_size() == 308


def test_bpe_is_that_of_the_library():
    ours = train_tokenizer(documents(TEXTS[:1] * 2), "bpe", 350).tokenizer  # one is learned from, one held out
    backend = byte_level(models.BPE(), (), words=True)
    special = ["<pad>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS[:1], trainer)
    assert ours.get_vocab() == backend.get_vocab()


def test_the_alphabet_is_the_librarys():
    assert sorted(alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())


# Unigram


def test_a_unigram_model_keeps_what_is_worth_most():
    """By hand: `abab` is worth a piece of its own, `ba` inside it is never used, and unused characters stay."""
    words = Counter({"abab": 100, "abc": 3, "c": 5})
    pieces = dict(unigram_pieces(words, ["ab", "ba", "abab", "bab", "abc"], "abcd", 5))
    assert pieces.keys() == {"a", "b", "c", "d", "abab"}
    # Each of the 100 words is one piece, each `abc` three.
    total = 100 + 3 * 3 + 5
    for piece, count in {"abab": 100, "a": 3, "b": 3, "c": 8}.items():
        assert pieces[piece] == pytest.approx(math.log(count / total), abs=1e-12)
    assert pieces["d"] < min(score for piece, score in pieces.items() if piece != "d")


def test_a_unigram_model_needs_no_more_tokens_than_the_librarys():
    """The library's own trainer on the same words, and as many pieces."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Counter(word for text in TEXTS for word, _ in split.pre_tokenize_str(text))
    library = byte_level(models.Unigram(), (), words=True)
    trainer = trainers.UnigramTrainer(vocab_size=300, initial_alphabet=alphabet(), show_progress=False)
    library.train_from_iterator(TEXTS, trainer)
    ours = train_tokenizer(documents(TEXTS), "unigram", 302).tokenizer.backend_tokenizer
    counts = [sum(len(e.ids) for e in one.encode_batch(TEXTS)) for one in (ours, library)]
    assert counts[0] <= counts[1] and sum(words.values()) <= counts[0]


# Held out


def test_documents_are_held_out_and_measured(monkeypatch):
    monkeypatch.setattr(trained_tokenizer, "HELD_OUT", 10)
    texts = ["ab" * 10 if i % 10 != 9 else f"held {i}" for i in range(40)]
    done = train_tokenizer(documents(texts), "bpe", 300)
    assert (done.documents, done.measured) == (36, 4)
    held = [text for text in texts if text.startswith("held")]
    tokens = [len(done.tokenizer(text)["input_ids"]) for text in held]
    assert done.bytes_per_token == sum(map(len, held)) / sum(tokens)
    assert "held" not in "".join(done.tokenizer.get_vocab())  # nothing was learned from them


def test_of_a_few_documents_the_last_is_held_out_and_of_one_none():
    done = train_tokenizer(documents(["ab ab", "cd cd", "ef ef"]), "bpe", 300)
    assert (done.documents, done.measured) == (2, 1) and "ef" not in done.tokenizer.get_vocab()
    done = train_tokenizer(documents(["ab ab"]), "bpe", 300)
    assert (done.documents, done.measured) == (1, 0) and "ab" in done.tokenizer.get_vocab()
    assert done.bytes_per_token == 2.5  # `ab`, ` ab`


def test_what_is_held_out_is_bounded(monkeypatch):
    monkeypatch.setattr(trained_tokenizer, "HELD_OUT", 2)
    monkeypatch.setattr(trained_tokenizer, "HELD_BYTES", 25)
    done = train_tokenizer(documents(["a" * 10] * 20), "bpe", 300)
    assert (done.documents, done.measured) == (18, 2)


# Settings


def test_special_tokens_have_names_or_stand_for_themselves():
    assert special_tokens([]) == ({"pad_token": "<pad>", "eos_token": "</s>"}, [])
    named, others = special_tokens(["mask", "eos=<|end|>", "bos", "<|a|>", "x=y"])
    assert named == {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<|end|>", "mask_token": "<mask>"}
    assert others == ["<|a|>", "x=y"]


@pytest.mark.parametrize(
    ("special", "said"),
    [(["eos="], "a token is empty"), (["eos=<pad>"], "'<pad>' is named twice"), (["a", "a"], "twice")],
)
def test_special_tokens_that_cannot_be(special, said):
    with pytest.raises(UserError, match=f"--special: .*{said}"):
        special_tokens(special)


def test_a_vocabulary_that_cannot_hold_the_bytes_is_refused():
    with pytest.raises(UserError, match="--vocab-size 257 is too small: 256 bytes and 2 special tokens need 258"):
        train_tokenizer(documents(["a"]), "bpe", 257)
    assert len(train_tokenizer(documents(["a"]), "unigram", 258).tokenizer) == 258
