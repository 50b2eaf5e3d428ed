"""`anyformer tokenize`: texts to a folder of token shards."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic import leftovers, new_folder
from ..data.documents import Corpus
from ..errors import UserError
from ..tokens.parallel import usable_cores
from .encode import Encoder, encode
from .format import INDEX, TOKENIZER, Index, fingerprint, is_token_folder, vocabulary_size
from .reader import TokenShards
from .writer import ShardWriter

SHARD_TOKENS = 2**27


@dataclass(frozen=True)
class Summary:
    """What was written.

    Attributes:
        index: of the folder.
        text_bytes: of all documents, in UTF-8.
        seconds: from the first document to the whole folder.
        skipped: rows left out.
    """

    index: Index
    text_bytes: int
    seconds: float
    skipped: int


def write_shards(
    sources: Sequence[str],
    target: Path,
    tokenizer: Any,
    *,
    column: str = "text",
    skip: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Tokenise the documents of some sources into a new folder.

    The same sources and tokenizer give the same bytes, whatever the number of workers. Memory holds a few batches of
    documents and their encodings; it grows with the longest document and not with their number.

    Args:
        tokenizer: with an end token.
        column: where rows keep their text.
        skip: leave out rows that cannot be used.
        shard_tokens: about the size of a shard.
        workers: processes; all cores by default.
        overwrite: replace a folder of token shards.
        progress: is told documents and tokens after each batch.

    Raises:
        UserError: a source or row that cannot be used, no document at all, or a target that exists.
    """
    if is_token_folder(target) and overwrite:
        within = [name for name in sources if Path(name).exists() and _is_below(Path(name), target)]
        if within:
            raise UserError(f"{target} holds {within[0]}, which is read: choose another folder")
    started = time.monotonic()
    size = vocabulary_size(tokenizer)
    dtype = "uint16" if size <= 2**16 else "uint32"
    corpus, encoder = Corpus(sources, column=column, skip=skip), Encoder(tokenizer, dtype)
    with new_folder(target, overwrite=overwrite, replaceable=is_token_folder) as folder:
        writer = ShardWriter(folder, dtype, shard_tokens)
        empty = text_bytes = 0
        for encoded in encode(corpus, encoder, workers or usable_cores()):
            writer.add(encoded.tokens, encoded.lengths)
            empty, text_bytes = empty + encoded.empty, text_bytes + encoded.size
            if progress is not None:
                progress(writer.documents, writer.tokens)
        shards, digest = writer.finish()
        tokenizer.save_pretrained(folder / TOKENIZER)
        index = Index(
            dtype=dtype,
            tokens=writer.tokens,
            documents=writer.documents,
            empty_documents=empty,
            vocab_size=size,
            eos_token_id=tokenizer.eos_token_id,
            tokenizer=fingerprint(tokenizer),
            digest=digest,
            sources=tuple({"name": name, "documents": count} for name, count in corpus.counts),
            shards=shards,
        )
        index.write(folder)
    return Summary(index, text_bytes, time.monotonic() - started, len(corpus.skipped))


def tokenize_sources(
    sources: Sequence[str], target: Path, tokenizer: str, *, trust_remote_code: bool, verify: bool, **options: Any
) -> Iterator[str]:
    """What the command does, as lines to print; `options` are those of `write_shards`."""
    from ..model_paths import resolve_path
    from ..models import load_tokenizer_from

    for folder in leftovers(target):
        yield f"{folder} was left by a run that was killed, or belongs to one that still works; delete it if none does."
    loaded = load_tokenizer_from(resolve_path(tokenizer), trust_remote_code=trust_remote_code)
    done = write_shards(sources, target, loaded, **options)
    index = done.index
    yield (
        f"{index.documents:,} documents, {index.tokens:,} tokens ({index.dtype}) in {len(index.shards)} "
        f"shard{'s'[: len(index.shards) != 1]}: {target}"
    )
    rate = done.text_bytes / 1e6 / done.seconds
    yield (
        f"{done.text_bytes / index.tokens:.2f} bytes a token; {done.seconds:.1f} s, {rate:.1f} MB and "
        f"{index.tokens / done.seconds:,.0f} tokens a second."
    )
    if done.skipped:
        yield f"{done.skipped:,} rows left out."
    if index.empty_documents:
        yield f"Of {index.empty_documents:,} documents the tokenizer leaves nothing but the end token."
    if verify:
        yield verified(target)


def verified(folder: Path) -> str:
    """Compare every file of a folder with its checksum; what to say of it.

    Raises:
        UserError: one differs; names it.
    """
    shards = TokenShards(folder)
    shards.verify()
    return f"{folder}: {len(shards.index.shards)} shards have the sizes and checksums in {INDEX}."


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
