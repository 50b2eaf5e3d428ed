"""The layout of a folder of token shards; docs/data.md describes it for other programs.

index.json            what follows in `Index`
tokenizer/            the tokenizer's own files
00000.tokens          token ids one after another, little-endian
00000.documents       uint64, little-endian: where each document begins, and the number of tokens at the end
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import UserError

INDEX, TOKENIZER = "index.json", "tokenizer"
FORMAT, VERSION = "anyformer-tokens", 1
DTYPES = {"uint16": 2, "uint32": 4}  # name -> bytes of a token


@dataclass(frozen=True)
class Shard:
    """One pair of files.

    Attributes:
        tokens_file, documents_file: names in the folder.
        tokens, documents: how many there are; no document goes on in the next shard.
        tokens_sha256, documents_sha256: of the files, in hexadecimal.
    """

    tokens_file: str
    documents_file: str
    tokens: int
    documents: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Index:
    """What `index.json` holds beside `format` and `version`.

    Attributes:
        dtype: of a token: uint16 where the vocabulary allows it, else uint32.
        tokens, documents: of all shards.
        empty_documents: those of which the tokenizer left nothing but the end token.
        vocab_size: the largest token id possible, plus 1.
        eos_token_id: the last token of every document.
        tokenizer: its fingerprint, see `fingerprint`.
        digest: of tokens and documents in their order, the same however they are cut into shards.
        sources: {"name", "documents"} of what was read.
        shards: in order.
    """

    dtype: str
    tokens: int
    documents: int
    empty_documents: int
    vocab_size: int
    eos_token_id: int
    tokenizer: str
    digest: str
    sources: tuple[dict[str, Any], ...]
    shards: tuple[Shard, ...]

    def write(self, folder: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, "byte_order": "little", **asdict(self)}
        (folder / INDEX).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def is_token_folder(source: Any) -> bool:
    """Whether a path names a folder of token shards, be it a damaged one."""
    if not isinstance(source, str | Path):
        return False
    try:
        folder = Path(source).expanduser()
        if not (folder / INDEX).is_file():
            return False
    except OSError:
        return False
    if any(folder.glob("*.tokens")):
        return True
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def read_index(folder: Path) -> Index:
    """
    Raises:
        UserError: there is none, or it is damaged or of another version.
    """
    path = folder / INDEX
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: is no folder of token shards: it has no {INDEX}. `anyformer tokenize` writes one"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError:
        raise UserError(f"{path}: is damaged: no JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: is no index of token shards: its format is not {FORMAT!r}")
    if content.get("version") != VERSION:
        raise UserError(f"{path}: version {content.get('version')} of the format; this program reads {VERSION}")
    try:
        values = {field.name: content[field.name] for field in fields(Index)}
        values["shards"] = tuple(Shard(**{f.name: shard[f.name] for f in fields(Shard)}) for shard in values["shards"])
        index = Index(**values | {"sources": tuple(values["sources"])})
        known = index.dtype in DTYPES and 0 <= index.eos_token_id < index.vocab_size
        consistent = known and all(
            sum(getattr(shard, name) for shard in index.shards) == getattr(index, name)
            for name in ("tokens", "documents")
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged: {error}") from None
    if not consistent:
        raise UserError(f"{path}: is damaged: its figures do not add up")
    return index


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 of all that decides which tokens a text becomes."""
    if getattr(tokenizer, "is_fast", False):
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content.pop("padding", None), content.pop("truncation", None)
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    content["eos_token_id"] = tokenizer.eos_token_id
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def vocabulary_size(tokenizer: Any) -> int:
    """The largest id plus 1, which is more than the number of tokens where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1
