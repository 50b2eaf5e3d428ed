"""Tokens kept between runs, under a key made of all that they depend on.

An entry is a folder `KEY` with the tokens, an Arrow file that is mapped into memory, and the report. It is made
beside its place and moved there in one step, so that two runs can make the same one at once, and a run that is cut
short leaves no half entry. Entries that nobody has used for long are removed, and the oldest where all are too large.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import inspect
import json
import math
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache as once
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..disk import cache_root
from ..errors import UserError
from .parallel import TOKENS, WORTH, parts_of, tokenize_into
from .report import TokenizationReport, TokenizedData, Tokenizing

Row = dict[str, Any]

REPORT = "report.json"
NEW = ".new-"  # how the name of a folder begins that is not finished
DAYS = 30  # an entry that no run has used for so long is removed
LIMIT, GIGABYTES = "ANYFORMER_CACHE_LIMIT", 20.0
# Libraries that decide what the tokens are.
LIBRARIES = ("tokenizers", "transformers", "jinja2", "trl")


def tokens_of(
    tokenizing: Tokenizing, rows: Iterable[Row], tokenizer: Any, *, num_proc: int | None = None, cache: bool = True
) -> TokenizedData:
    """Rows as tokens: those of an earlier run where nothing that they depend on has changed.

    Args:
        rows: can be iterated more than once; they need not fit into memory.
        num_proc: see `parallel.tokenize_into`.
        cache: whether to look for them among those of earlier runs, and to keep them.

    Raises:
        UserError: rows that cannot be used, or none left.
    """
    limit, trouble = cache_limit() if cache else 0, ""
    if limit:
        try:
            key = Key.of(tokenizing, rows, tokenizer)
            if key is not None:
                return _kept(cache_folder(), key, tokenizing, rows, tokenizer, num_proc, limit)
        except OSError as error:
            trouble = (
                f"the tokens are not kept for the next run: {cache_folder()}: {error.strerror or error}. Make room, "
                "give another place in XDG_CACHE_HOME, or set data.cache to false"
            )
        except Unsteady as error:
            trouble = f"the tokens are not kept for the next run: {error}"
    data = _not_kept(tokenizing, rows, tokenizer, num_proc)
    if trouble:
        data.report.warnings.append(trouble)
    return data


def _not_kept(tokenizing: Tokenizing, rows: Iterable[Row], tokenizer: Any, num_proc: int | None) -> TokenizedData:
    started = time.monotonic()
    if hasattr(tokenizing.function, "part") and len(list(islice(parts_of(rows), WORTH + 1))) > WORTH:
        # Too many to be held in memory: in a file that ends with the data set. Where there is no room, in memory.
        with suppress(OSError):
            folder = tempfile.TemporaryDirectory(prefix="anyformer-tokens-")
            try:
                report, processes = tokenize_into(Path(folder.name), tokenizing, rows, tokenizer, num_proc)
                dataset = _mapped(Path(folder.name) / TOKENS, Path(folder.name).name)
            except BaseException:
                folder.cleanup()
                raise
            report.made = _took(started, processes)
            weakref.finalize(dataset, folder.cleanup)
            return TokenizedData(dataset, report)
    data = tokenizing.run(rows, tokenizer)
    data.report.made = _took(started, 1)
    return data


def _took(started: float, processes: int) -> str:
    return f"made in {time.monotonic() - started:.1f} s by {processes} process{'es' if processes > 1 else ''}"


# Settings of the user


def cache_folder() -> Path:
    return cache_root() / "tokens"


def cache_limit() -> int:
    """Bytes that all entries may take; with 0 nothing is kept.

    Raises:
        UserError: `ANYFORMER_CACHE_LIMIT` is no number.
    """
    given = os.environ.get(LIMIT, str(GIGABYTES))
    try:
        size = float(given)
    except ValueError:
        size = math.nan
    if not 0 <= size < math.inf:
        raise UserError(f"{LIMIT}: must be a number of gigabytes from 0, which turns the cache off; found {given!r}")
    return int(size * 1e9)


# Keys


class Unsteady(Exception):
    """The rows are others each time they are read."""


class Key(NamedTuple):
    """Digests of how rows become tokens and of the rows."""

    how: str
    rows: str

    def __str__(self) -> str:
        return _digest(f"{self.how} {self.rows}".encode())

    @classmethod
    def of(cls, tokenizing: Tokenizing, rows: Iterable[Row], tokenizer: Any) -> "Key | None":
        """Of function and settings, the code of this package, the tokenizer with its template, libraries and rows.

        None: the tokens depend on what has no digest, as a tokenizer does that is written in Python alone.
        """
        if not getattr(tokenizer, "is_fast", False):
            return None
        function, settings = tokenizing
        what = {
            "function": f"{function.__module__}.{function.__qualname__}",
            "code": [_code_of_package(), *_code_of(function)],
            "settings": settings,
            "tokenizer": tokenizer_digest(tokenizer),
            "versions": [sys.version_info[:2], *map(importlib.metadata.version, LIBRARIES)],
        }
        how = _digest(json.dumps(what, sort_keys=True).encode())
        watched = _Watched(rows)
        try:
            for _ in watched:
                pass
        except TypeError:  # a row that holds what JSON has no key for
            return None
        return cls(how, watched.digest)


class _Watched:
    """Rows whose digest is taken while they are iterated."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows, self.digest = rows, ""

    def __iter__(self) -> Iterator[Row]:
        digest = hashlib.blake2b(digest_size=20)
        for row in self.rows:
            # Keys in their order: a template that writes a tool's schema writes it in that order.
            text = json.dumps(row, default=lambda value: [type(value).__qualname__, repr(value)])
            digest.update(text.encode() + b"\n")
            yield row
        self.digest = digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Of a fast tokenizer: its backend, special tokens, chat template, options and class."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # What the last call has asked for is no property of the tokenizer.
    backend["truncation"] = backend["padding"] = None
    # Where it was found, what it was made with and what it has said are none either; its options are the attributes.
    idle = {"name_or_path", "init_kwargs", "init_inputs", "files_loaded", "deprecation_warnings", "verbose"}
    options = {name: repr(value) for name, value in vars(tokenizer).items() if name not in idle and _is_told(value)}
    kinds = [kind for kind in type(tokenizer).__mro__ if not kind.__module__.startswith(("builtins", "transformers."))]
    what = {
        "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
        "code": [_code_of(kind) for kind in kinds],
        "backend": backend,
        "options": options,
        # A template that writes the date writes another one tomorrow.
        "today": str(datetime.date.today()) if "strftime_now" in str(tokenizer.chat_template) else "",
    }
    return _digest(json.dumps(what, sort_keys=True).encode())


def _is_told(value: Any) -> bool:
    """Whether a value's text is the same in every process: it is made of plain values and tokens."""
    if isinstance(value, dict):
        return all(map(_is_told, [*value, *value.values()]))
    if isinstance(value, list | tuple):
        return all(map(_is_told, value))
    return value is None or isinstance(value, str | int | float) or type(value).__name__ == "AddedToken"


@once
def _code_of_package() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return _digest(b"".join(file.name.encode() + file.read_bytes() for file in files))


def _code_of(thing: Any) -> list[str]:
    """Of the source file that a function or a class stands in, where there is one."""
    try:
        return [_digest(Path(inspect.getfile(inspect.unwrap(thing))).read_bytes())]
    except (OSError, TypeError):
        return []


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=20).hexdigest()


# Entries


def _kept(
    root: Path, key: Key, tokenizing: Tokenizing, rows: Iterable[Row], tokenizer: Any, num_proc: int | None, limit: int
) -> TokenizedData:
    """The tokens of the entry, which is made where it is not there.

    Raises:
        OSError: it cannot be written.
        Unsteady: the rows are not those of the key.
    """
    name = str(key)
    found = load(root / name)
    if found is not None:
        return found
    root.mkdir(parents=True, exist_ok=True)
    folder, started = Path(tempfile.mkdtemp(prefix=NEW, dir=root)), time.monotonic()
    try:
        watched = rows if isinstance(rows, Sequence) else _Watched(rows)
        report, processes = tokenize_into(folder, tokenizing, watched, tokenizer, num_proc)
        if isinstance(watched, _Watched) and watched.digest != key.rows:
            raise Unsteady("the rows are others each time they are read")
        file = folder / TOKENS
        about = {"made": time.strftime("%Y-%m-%d %H:%M"), "size": file.stat().st_size, "digest": _digest_of(file)}
        about["report"] = {k: value for k, value in dataclasses.asdict(report).items() if k != "made"}
        (folder / REPORT).write_text(json.dumps(about), encoding="utf-8")
        try:
            folder.rename(root / name)
        except OSError:
            if not (root / name).is_dir():
                raise
            # Another run has made the same in the meantime.
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    dataset = _mapped(root / name / TOKENS, name)
    report.made = _took(started, processes)
    clean(root, limit, keep=name)
    return TokenizedData(dataset, report)


def load(entry: Path) -> TokenizedData | None:
    """The tokens of an entry, or None; one that is damaged is removed."""
    try:
        about = json.loads((entry / REPORT).read_text(encoding="utf-8"))
        file = entry / TOKENS
        if file.stat().st_size != about["size"] or _digest_of(file) != about["digest"]:
            raise ValueError("other content than was written")
        dataset = _mapped(file, entry.name)
        report = TokenizationReport(**about["report"], made=f"from the cache (made {about['made']})")
    except FileNotFoundError:
        if not entry.exists():
            return None
        _remove(entry)
        return None
    except (OSError, ValueError, KeyError, TypeError):
        _remove(entry)
        return None
    with suppress(OSError):  # it is somebody else's, or gone
        os.utime(entry / REPORT)  # used now
    return TokenizedData(dataset, report)


def _mapped(file: Path, name: str) -> Any:
    """A data set over a file that is not read into memory."""
    import pyarrow as pa
    from datasets import Dataset

    # Not `Dataset.from_file`: what a trainer then makes of it would be written beside the file.
    return Dataset(pa.ipc.open_stream(pa.memory_map(str(file))).read_all(), fingerprint=name)


def _digest_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def clean(root: Path, limit: int, keep: str = "") -> None:
    """Remove entries that are too old, and of the others the least recently used until all fit into `limit` bytes.

    Args:
        keep: an entry that stays.
    """
    old, entries = time.time() - DAYS * 86400, []
    for entry in root.iterdir():
        try:
            unfinished = entry.name.startswith(NEW)
            used = (entry if unfinished else entry / REPORT).stat().st_mtime
            size = sum(file.stat().st_size for file in entry.iterdir())
        except OSError:  # another run removes it
            continue
        if entry.name == keep:
            limit -= size
        elif used < (time.time() - 86400 if unfinished else old):  # left by a run that was killed, or unused
            _remove(entry)
        elif not unfinished:
            entries.append((used, size, entry))
    for _, size, entry in sorted(entries, key=lambda found: found[0], reverse=True):
        limit -= size
        if limit < 0:
            _remove(entry)


def _remove(entry: Path) -> None:
    """In two steps, so that no run finds half of it."""
    folder = Path(tempfile.mkdtemp(prefix=NEW, dir=entry.parent))
    with suppress(OSError):  # another run was faster
        entry.rename(folder / entry.name)
    shutil.rmtree(folder, ignore_errors=True)
