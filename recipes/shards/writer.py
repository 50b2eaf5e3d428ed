"""Writing token shards."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .format import DTYPES, Shard

if TYPE_CHECKING:
    import numpy as np


class ShardWriter:
    """Writes documents one after another into a folder that is there.

    A shard ends before the document that would take it beyond `shard_tokens`; a longer document has one to itself.
    Memory does not grow with what is written.

    Attributes:
        shards: that are whole.
        tokens, documents: added so far.
    """

    def __init__(self, folder: Path, dtype: str, shard_tokens: int) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self.shards: list[Shard] = []
        self.tokens = self.documents = 0
        self._files: tuple[BinaryIO, BinaryIO] | None = None
        self._all = hashlib.sha256(), hashlib.sha256()  # of all tokens, and of all lengths

    def add(self, tokens: "np.ndarray[Any, Any]", lengths: "np.ndarray[Any, Any]") -> None:
        """Some documents.

        Args:
            tokens: [sum of lengths], the documents one after another.
            lengths: [documents], at least 1 each.
        """
        import numpy as np

        tokens = np.ascontiguousarray(tokens, dtype=np.dtype(self.dtype).newbyteorder("<"))
        lengths = np.ascontiguousarray(lengths, dtype="<u8")
        self._all[0].update(tokens.data)
        self._all[1].update(lengths.data)
        ends = np.cumsum(lengths)
        done = before = 0  # documents, and their tokens
        while done < len(lengths):
            if self._files is None:
                self._open()
            room = max(self.shard_tokens - self._shard_tokens, 0)
            fitting = int(np.searchsorted(ends, before + room, side="right"))
            if fitting == done and not self._shard_tokens:
                fitting = done + 1  # longer than a shard
            if fitting == done:
                self._close()
                continue
            upto = int(ends[fitting - 1])
            offsets = self._shard_tokens + (ends[done:fitting] - np.uint64(before))
            self._write(tokens[before:upto], offsets.astype("<u8"))
            done, before = fitting, upto

    def finish(self) -> tuple[tuple[Shard, ...], str]:
        """Close the last shard; the shards and the digest of what they hold."""
        if self._files is not None:
            self._close()
        parts = [f"{self.dtype}:".encode(), *(digest.digest() for digest in self._all)]
        return tuple(self.shards), hashlib.sha256(b"".join(parts)).hexdigest()

    def _open(self) -> None:
        names = [f"{len(self.shards):05d}.{kind}" for kind in ("tokens", "documents")]
        self._files = (self.folder / names[0]).open("wb"), (self.folder / names[1]).open("wb")
        self._digests = hashlib.sha256(), hashlib.sha256()
        self._shard_tokens = self._shard_documents = 0
        self._put(1, bytes(8))  # the first document begins at 0

    def _put(self, which: int, content: Any) -> None:
        assert self._files is not None
        self._files[which].write(content)
        self._digests[which].update(content)

    def _write(self, tokens: Any, offsets: Any) -> None:
        self._put(0, tokens.data)
        self._put(1, offsets.data)
        assert tokens.nbytes == len(tokens) * DTYPES[self.dtype]
        self._shard_tokens += len(tokens)
        self._shard_documents += len(offsets)
        self.tokens, self.documents = self.tokens + len(tokens), self.documents + len(offsets)

    def _close(self) -> None:
        assert self._files is not None
        for file in self._files:
            file.close()
        tokens_file, documents_file = (Path(file.name).name for file in self._files)
        sums = [digest.hexdigest() for digest in self._digests]
        self.shards.append(Shard(tokens_file, documents_file, self._shard_tokens, self._shard_documents, *sums))
        self._files = None
