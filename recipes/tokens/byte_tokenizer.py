"""A tokenizer that needs no file: every byte of a text in UTF-8 is a token.

For models that are trained from the start on a task of spelling, or in an alphabet that no tokenizer at hand knows
(ByT5, arXiv:2105.13626). It is an ordinary fast tokenizer: saved beside a model it opens with `AutoTokenizer`.
"""

from typing import Any

from .byte_level import alphabet, as_pretrained, byte_level

# What `model.tokenizer` says to have it.
BYTES = "builtin:bytes"
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}


def byte_tokenizer() -> Any:
    """Ids 0 to 3 are `<pad>`, `<s>`, `</s>` and `<mask>`, and byte b is id b + 4. Nothing is added to a text."""
    from tokenizers import models

    vocabulary = {token: index for index, token in enumerate(SPECIAL.values())}
    vocabulary |= {symbol: byte + len(SPECIAL) for byte, symbol in enumerate(alphabet())}
    return as_pretrained(byte_level(models.BPE(vocab=vocabulary, merges=[]), SPECIAL.values(), words=False), SPECIAL)
