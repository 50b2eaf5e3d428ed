"""A tokenizer that a recipe learns from its own training rows: `model.tokenizer: builtin:bpe:4096`.

For models that are trained from the start on texts that no tokenizer at hand was made for. Held-out rows are not read,
so what is measured on them owes nothing to the vocabulary. The same rows give the same tokenizer: a run that is
resumed, and each of several processes, learns it again.
"""

from collections.abc import Iterable
from typing import Any

from ..errors import UserError
from .byte_tokenizer import SPECIAL

# What `model.tokenizer` says to have it, with the number of tokens behind it.
BPE = "builtin:bpe:"
SMALLEST = 256 + len(SPECIAL)


def learned_size(name: str | None) -> int | None:
    """The size of the vocabulary that a recipe's tokenizer is to be learned with; None for any other tokenizer.

    Raises:
        UserError: no number, or one that leaves no room for the bytes.
    """
    if name is None or not name.startswith(BPE):
        return None
    said = name.removeprefix(BPE)
    if not (said.isascii() and said.isdigit()) or int(said) < SMALLEST:
        raise UserError(
            f"{name!r} names no size: write {BPE}N for byte pairs learned from the training rows, N tokens in all and "
            f"at least {SMALLEST} (256 bytes and {len(SPECIAL)} special tokens), such as {BPE}4096"
        )
    return int(said)


def learn_tokenizer(texts: Iterable[str], size: int, *, encoder: bool) -> Any:
    """Byte-level BPE with the special tokens of `builtin:bytes`.

    Args:
        texts: each read once.
        size: of the vocabulary; smaller where the texts hold no more pairs.
        encoder: a text becomes `<s> text </s>` and a pair `<s> one </s> other </s>`, as an encoder wants it that reads
            a text at its first token; else nothing is added.
    """
    from ..data.documents import Document
    from .trained_tokenizer import train_tokenizer

    special = [name.removesuffix("_token") for name in SPECIAL]
    documents = (Document(text, len(text.encode("utf-8", "surrogatepass"))) for text in texts)
    tokenizer = train_tokenizer(documents, "bpe", size, special).tokenizer
    if encoder:
        _add_ends(tokenizer)
    return tokenizer


def _add_ends(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    start, end = tokenizer.bos_token, tokenizer.eos_token
    tokenizer.cls_token, tokenizer.sep_token = start, end
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(start, tokenizer.bos_token_id), (end, tokenizer.eos_token_id)],
    )
