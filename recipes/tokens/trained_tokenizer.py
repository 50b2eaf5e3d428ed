"""`anyformer tokenizer`: a byte-level BPE or unigram tokenizer from texts."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..atomic import new_folder
from ..data.documents import Corpus, Document
from ..errors import UserError
from .byte_level import alphabet, as_pretrained, byte_level
from .byte_tokenizer import SPECIAL

ALWAYS = ("pad", "eos")
NAMED = tuple(name.removesuffix("_token") for name in SPECIAL)
# One document of so many is measured and not learned from, until so many bytes of them are held.
HELD_OUT, HELD_BYTES = 50, 1 << 23
# A unigram model begins with so many times its pieces.
_SEEDS = 4


@dataclass(frozen=True)
class Trained:
    """A tokenizer and what it is worth.

    Attributes:
        tokenizer: to be saved.
        documents: learned from.
        measured: documents that the figure is of; 0 where there was but one, and it was learned from.
        bytes_per_token: on these.
        seconds: of reading and learning.
    """

    tokenizer: Any
    documents: int
    measured: int
    bytes_per_token: float
    seconds: float


def special_tokens(given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """`--special`: `bos` or `mask`, `eos=<|end|>`, or any other token as it is written.

    Returns:
        "eos_token" and its like -> token, pad and eos always among them, and the tokens without a name.

    Raises:
        UserError: a token is empty or named twice.
    """
    named = {f"{name}_token": SPECIAL[f"{name}_token"] for name in ALWAYS}
    others: list[str] = []
    for entry in given:
        name, equals, token = entry.partition("=")
        if name in NAMED:
            named[f"{name}_token"] = token if equals else SPECIAL[f"{name}_token"]
        else:
            others.append(entry)
    tokens = [*named.values(), *others]
    for token in tokens:
        if not token.strip():
            raise UserError(f"--special: a token is empty: write one of {', '.join(NAMED)}, NAME=TOKEN or a token")
        if tokens.count(token) > 1:
            raise UserError(f"--special: {token!r} is named twice: every special token needs a text of its own")
    # In the order of the table, whatever the order on the command line.
    return {name: named[name] for name in SPECIAL if name in named}, others


def train_tokenizer(
    documents: Iterable[Document], kind: Literal["bpe", "unigram"], size: int, special: Sequence[str] = ()
) -> Trained:
    """Learn a vocabulary from documents, which are read once.

    The same documents give the same tokenizer. Memory holds the different words of the texts, not the texts.

    Args:
        size: of the vocabulary, special tokens and 256 bytes included.
        special: see `special_tokens`.

    Raises:
        UserError: the vocabulary cannot hold bytes and special tokens.
    """
    named, others = special_tokens(special)
    tokens, symbols = [*named.values(), *others], alphabet()
    if size < len(tokens) + len(symbols):
        raise UserError(
            f"--vocab-size {size} is too small: {len(symbols)} bytes and {len(tokens)} special tokens need "
            f"{len(tokens) + len(symbols)}"
        )
    started = time.monotonic()
    reading = _Reading(documents)
    backend = (_bpe if kind == "bpe" else _unigram)(reading, tokens, size)
    held = reading.held
    texts = held or [reading.last]
    ids = backend.encode_batch_fast([document.text for document in texts], add_special_tokens=False)
    count = sum(len(encoding.ids) for encoding in ids)
    rate = sum(document.size for document in texts) / max(count, 1)
    tokenizer = as_pretrained(backend, named, others)
    return Trained(tokenizer, reading.count, len(held), rate, time.monotonic() - started)


class _Reading:
    """The texts to learn from, and the documents that are held out of them.

    Of a few documents the last one is held out; of one, none.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        self.documents, self.held = documents, list[Document]()
        self.count, self.last = 0, Document("", 0)

    def __iter__(self) -> Iterator[str]:
        waiting: Document | None = None
        room = HELD_BYTES
        for number, document in enumerate(self.documents):
            if number % HELD_OUT == HELD_OUT - 1 and document.size <= room:
                self.held.append(document)
                room -= document.size
                continue
            if waiting is not None:
                yield self._learned(waiting)
            waiting = document
        if waiting is not None:
            if not self.held and self.count:
                self.held.append(waiting)
            else:
                yield self._learned(waiting)

    def _learned(self, document: Document) -> str:
        self.count, self.last = self.count + 1, document
        return document.text


def _bpe(texts: Iterable[str], special: list[str], size: int) -> Any:
    """Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) on bytes."""
    from tokenizers import models, trainers

    backend = byte_level(models.BPE(), special, words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _unigram(texts: Iterable[str], special: list[str], size: int) -> Any:
    """A unigram language model whose first pieces are the merges of BPE."""
    from tokenizers import models

    from .unigram import unigram_pieces

    split = byte_level(models.BPE(), (), words=True).pre_tokenizer
    words: Counter[str] = Counter()

    def counted() -> Iterator[str]:
        for text in texts:
            words.update(word for word, _ in split.pre_tokenize_str(text))
            yield text

    wanted = size - len(special)
    seeds = _bpe(counted(), [], _SEEDS * wanted).get_vocab()
    pieces = unigram_pieces(words, seeds, alphabet(), wanted)
    vocabulary = [*((token, 0.0) for token in special), *pieces]
    return byte_level(models.Unigram(vocabulary), special, words=True)


def write_tokenizer(
    sources: Sequence[str],
    target: Path,
    kind: Literal["bpe", "unigram"],
    size: int,
    *,
    special: Sequence[str] = (),
    column: str = "text",
    skip: bool = False,
    overwrite: bool = False,
) -> Iterator[str]:
    """What the command does, as lines to print.

    Raises:
        UserError: a source, row or setting that cannot be used, or a target that exists.
    """
    special_tokens(special)
    corpus = Corpus(sources, column=column, skip=skip)
    with new_folder(target, overwrite=overwrite, replaceable=_holds_only_a_tokenizer) as folder:
        done = train_tokenizer(corpus, kind, size, special)
        done.tokenizer.save_pretrained(folder)
    found = len(done.tokenizer)
    yield f"{kind}, {found:,} tokens from {done.documents:,} documents in {done.seconds:.1f} s: {target}"
    if found < size:
        yield f"The texts hold no more than these; {size:,} were asked for."
    where = f"{done.measured:,} documents that were held out"
    yield f"{done.bytes_per_token:.2f} bytes a token on {where if done.measured else 'the text it was trained on'}."
    if corpus.skipped:
        yield f"{len(corpus.skipped):,} rows left out."


def _holds_only_a_tokenizer(folder: Path) -> bool:
    """Whether a folder is of the kind that is written here; a model beside its tokenizer is not replaced."""
    names = {path.name for path in folder.iterdir()}
    return "tokenizer.json" in names and names <= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
