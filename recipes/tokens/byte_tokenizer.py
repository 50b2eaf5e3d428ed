"""A tokenizer that needs no file: every byte of a text in UTF-8 is a token.

For models that are trained from the start on a task of spelling, or in an alphabet that no tokenizer at hand knows
(ByT5, arXiv:2105.13626). It is an ordinary fast tokenizer: saved beside a model it opens with `AutoTokenizer`.
"""

from typing import Any

# What `model.tokenizer` says to have it.
BYTES = "builtin:bytes"
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}


def byte_tokenizer() -> Any:
    """Ids 0 to 3 are `<pad>`, `<s>`, `</s>` and `<mask>`, and byte b is id b + 4. Nothing is added to a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(SPECIAL.values())}
    vocabulary |= {symbol: byte + len(SPECIAL) for byte, symbol in enumerate(_symbols())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL.values()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **SPECIAL)


def _symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table): printable characters of
    Latin-1 for themselves, the others from U+0100 on in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
