"""What tokenizers on bytes have in common: any text comes back exactly.

The text's bytes in UTF-8 are written as 256 printable characters (GPT-2's table), and tokens are strings of these. So
no text has a character that the vocabulary lacks.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def byte_level(model: Any, special: Iterable[str], *, words: bool) -> Any:
    """A backend around a model, with the special tokens first in the vocabulary.

    Args:
        model: of the library `tokenizers`, on byte-level characters.
        words: tokens end where words do, by GPT-2's rule.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def as_pretrained(backend: Any, named: Mapping[str, str], others: Iterable[str] = ()) -> Any:
    """The tokenizer that is saved beside a model and opens with `AutoTokenizer`; it adds nothing to a text.

    Args:
        named: "eos_token" and its like -> token.
        others: special tokens without a name.
    """
    from transformers import PreTrainedTokenizerFast

    extra = {"extra_special_tokens": list(others)} if others else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **dict(named), **extra)


def alphabet() -> list[str]:
    """The character that stands for each byte: printable ones of Latin-1 for themselves, the others from U+0100 on in
    order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
