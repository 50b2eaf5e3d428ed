"""Texts to tokens on all cores, in order, with a bounded number of texts in hand.

A worker process is given the tokenizer's own JSON and imports the library `tokenizers` alone, so it is ready at once.
Processes were measured against the library's threads (docs/results.md): threads wait for each other at the end of each
batch and for the one that takes their tokens over into Python.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from ..data.documents import Document

# A batch is full with so many bytes of text, or documents. Its encodings take about 100 bytes a token.
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 1024
# Batches in hand for each worker: one in work, one ready, one done.
_IN_HAND = 3


class Encoded(NamedTuple):
    """Some documents: `tokens` one after another, each with its end token, their `lengths`, and what they were."""

    tokens: "np.ndarray[Any, Any]"
    lengths: "np.ndarray[Any, Any]"
    empty: int  # documents of which only the end token is left
    size: int  # bytes of text


class Encoder:
    """Documents to tokens as `plain_text` makes them: the tokenizer's own special tokens, and one end token.

    It can be pickled, and needs neither torch nor transformers where the tokenizer is a fast one.
    """

    def __init__(self, tokenizer: Any, dtype: str) -> None:
        self.dtype, self.eos = dtype, tokenizer.eos_token_id
        self.fast = bool(tokenizer.is_fast)
        self.content = tokenizer.backend_tokenizer.to_str() if self.fast else ""
        self.keep_special = bool(getattr(tokenizer, "split_special_tokens", False))
        self._tokenizer = None if self.fast else tokenizer

    def __call__(self, texts: list[str]) -> Encoded:
        import numpy as np

        ids = self._ids(texts)
        whole = [i if i[-1:] == [self.eos] else [*i, self.eos] for i in ids]
        lengths = np.fromiter(map(len, whole), dtype=np.int64, count=len(whole))
        tokens = np.fromiter(chain.from_iterable(whole), dtype=self.dtype, count=int(lengths.sum()))
        return Encoded(tokens, lengths, int((lengths == 1).sum()), 0)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not self.fast:
            assert self._tokenizer is not None
            return self._tokenizer(texts)["input_ids"]
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(self.content)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            self._tokenizer.encode_special_tokens = self.keep_special
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"_tokenizer": None} if self.fast else {})


def batches(documents: "Iterable[Document]") -> "Iterator[list[Document]]":
    """Documents in batches of about the same size; a longer one makes a batch by itself."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        if batch and (size + document.size > BATCH_BYTES or len(batch) == BATCH_DOCUMENTS):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += document.size
    if batch:
        yield batch


def encode(documents: "Iterable[Document]", encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """All documents in their order, batch by batch.

    Args:
        workers: processes; with 1 everything is done in this one, by the library's threads.

    Raises:
        UserError: a worker died, as it does where memory runs out.
    """
    if workers == 1:
        for batch in batches(documents):
            yield _sized(encoder([document.text for document in batch]), batch)
        return
    import multiprocessing

    # Not by fork: the threads of a tokenizer that this process has used would be missing in the copy.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(encoder,))
    waiting: deque[tuple[Future[Encoded], list[Document]]] = deque()
    try:
        for batch in batches(documents):
            waiting.append((pool.submit(_encode, [document.text for document in batch]), batch))
            if len(waiting) > _IN_HAND * workers:
                future, first = waiting.popleft()
                yield _sized(future.result(), first)
        while waiting:
            future, first = waiting.popleft()
            yield _sized(future.result(), first)
    except BrokenProcessPool:
        raise UserError(
            "a worker process died, as it does where memory runs out: give fewer --workers, or split the longest "
            "documents"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _sized(encoded: Encoded, batch: "list[Document]") -> Encoded:
    return encoded._replace(size=sum(document.size for document in batch))


# In the worker processes

_encoder: Encoder | None = None


def _begin(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is the unit of parallel work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all at once; the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waits for work on a pipe that its siblings hold open: nothing else tells it that nobody is left."""
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode(texts: list[str]) -> Encoded:
    assert _encoder is not None
    return _encoder(texts)
