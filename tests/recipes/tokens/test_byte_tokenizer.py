"""The tokenizer that needs no file."""

import random

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from anyformer.recipes.models import read_tokenizer
from anyformer.recipes.tokens.byte_level import alphabet
from anyformer.recipes.tokens.byte_tokenizer import SPECIAL, byte_tokenizer


def test_every_byte_is_a_token(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    rng = random.Random(0)
    ranges = ((0, 0x7F), (0x80, 0x7FF), (0x4E00, 0x9FFF), (0x1F300, 0x1F5FF))
    for tokenizer in (read_tokenizer("builtin:bytes"), AutoTokenizer.from_pretrained(tmp_path)):
        assert len(tokenizer) == 256 + len(SPECIAL) and tokenizer.is_fast
        assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == ["<pad>", "<s>", "</s>", "<mask>"]
        ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id)
        assert ids == (0, 1, 2, 3)
        for _ in range(200):
            text = "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(0, 12)))
            tokens = tokenizer(text)["input_ids"]
            assert tokens == [byte + 4 for byte in text.encode()]
            assert tokenizer.decode(tokens) == text


def test_the_symbols_are_those_of_byte_level_vocabularies():
    assert len(alphabet()) == 256 and set(alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())


def test_special_tokens_are_whole_and_words_are_known():
    tokenizer = byte_tokenizer()
    assert tokenizer("a</s>")["input_ids"] == [ord("a") + 4, 2]
    assert tokenizer(["ab", "\u4e2d"], is_split_into_words=True).word_ids() == [0, 0, 1, 1, 1]
