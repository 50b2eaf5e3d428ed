"""Reading token shards without reading what is not asked for."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .format import DTYPES, TOKENIZER, Shard, fingerprint, read_index, vocabulary_size

if TYPE_CHECKING:
    import numpy as np

_CHUNK = 1 << 22


class TokenShards:
    """A folder of token shards as one long row of tokens, cut into documents.

    The files are mapped into memory, each when it is first needed. Every size is compared with the index when the
    folder is opened; `verify` compares the contents, too.

    Attributes:
        folder, index: where, and what it holds.
    """

    def __init__(self, folder: str | Path) -> None:
        """
        Raises:
            UserError: no such folder, or an index or a file that is damaged; names it.
        """
        import numpy as np

        self.folder = Path(folder).expanduser()
        self.index = read_index(self.folder)
        for shard in self.index.shards:
            self._check_size(shard.tokens_file, shard.tokens * DTYPES[self.index.dtype])
            self._check_size(shard.documents_file, (shard.documents + 1) * 8)
        # Tokens and documents before each shard, and in all.
        self._tokens_before = np.cumsum([0, *(shard.tokens for shard in self.index.shards)])
        self._documents_before = np.cumsum([0, *(shard.documents for shard in self.index.shards)])
        self._maps: dict[str, Any] = {}

    def _check_size(self, name: str, expected: int) -> None:
        path = self.folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise UserError(
                f"{path}: is missing or cannot be read: {error.strerror}. Tokenise the data again"
            ) from None
        if found != expected:
            what = "is cut short" if found < expected else "is too long"
            raise UserError(f"{path}: {what}: {found:,} bytes, expected {expected:,}. Tokenise the data again")

    def __len__(self) -> int:
        """Tokens."""
        return self.index.tokens

    @property
    def documents(self) -> int:
        return self.index.documents

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer that made the tokens."""
        return self.folder / TOKENIZER

    def read(self, start: int, count: int) -> "np.ndarray[Any, Any]":
        """Tokens `start` to `start + count` of the whole row.

        Returns:
            [count], int64.
        """
        import numpy as np

        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        found = np.empty(count, dtype=np.int64)
        number = int(np.searchsorted(self._tokens_before, start, side="right")) - 1
        done = 0
        while done < count:
            shard = self.index.shards[number]
            at = start + done - int(self._tokens_before[number])
            size = min(shard.tokens - at, count - done)
            found[done : done + size] = self._map(shard.tokens_file, self.index.dtype)[at : at + size]
            done, number = done + size, number + 1
        return found

    def starts(self, numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Where documents begin in the whole row.

        Args:
            numbers: of documents, ascending; the number of all documents stands for the end.

        Returns:
            int64, as many.
        """
        import numpy as np

        found = np.full(len(numbers), len(self), dtype=np.int64)
        bounds = np.searchsorted(numbers, self._documents_before)
        for number, shard in enumerate(self.index.shards):
            here = slice(bounds[number], bounds[number + 1])
            if here.start < here.stop:
                local = numbers[here] - self._documents_before[number]
                found[here] = self._offsets(shard)[local].astype(np.int64) + self._tokens_before[number]
        return found

    def document(self, number: int) -> "np.ndarray[Any, Any]":
        """The tokens of one document, its end token included: [length], int64."""
        import numpy as np

        if not 0 <= number < self.documents:
            raise IndexError(f"document {number} of {self.documents}")
        start, end = self.starts(np.array([number, number + 1])).tolist()
        return self.read(start, end - start)

    def check_tokenizer(self, tokenizer: Any, name: str | None) -> None:
        """
        Args:
            name: of the tokenizer, for the message.

        Raises:
            UserError: the tokens were made with another one.
        """
        found = fingerprint(tokenizer)
        if found != self.index.tokenizer:
            raise UserError(
                f"data: {self.folder} was made with a tokenizer of {self.index.vocab_size:,} tokens (fingerprint "
                f"{self.index.tokenizer[:12]}), but that of the model, {name}, has {vocabulary_size(tokenizer):,} "
                f"({found[:12]}): set model.tokenizer to {self.tokenizer_folder}, or tokenise the texts with "
                f"--tokenizer {name}"
            )

    def verify(self) -> None:
        """Compare every file with its checksum; reads everything once.

        Raises:
            UserError: one differs; names it.
        """
        for shard in self.index.shards:
            for name, expected in (
                (shard.tokens_file, shard.tokens_sha256),
                (shard.documents_file, shard.documents_sha256),
            ):
                if _sha256(self.folder / name) != expected:
                    raise UserError(
                        f"{self.folder / name}: is damaged: its SHA-256 is not the one in the index. Tokenise the data "
                        "again"
                    )

    def _offsets(self, shard: Shard) -> Any:
        return self._map(shard.documents_file, "uint64")

    def _map(self, name: str, dtype: str) -> Any:
        import numpy as np

        if name not in self._maps:
            self._maps[name] = np.memmap(self.folder / name, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
        return self._maps[name]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a worker of a loader maps the files itself


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
