"""Files of rows: which a source names, and their rows with the place of every fault.

A reason never quotes the content of a row, since data are often private.
"""

import bz2
import difflib
import glob
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError
from .faults import BadRow, Skipped, clip, place, type_name
from .parsing import check_encoding, read_csv, read_json, read_jsonl, read_parquet, read_text, read_tsv

__all__ = ["SUFFIXES", "BadRow", "Skipped", "clip", "find_files", "place", "read_rows", "type_name"]

_READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".tsv": read_tsv, ".txt": read_text}


def _open_zstd(path: Path) -> BinaryIO:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
SUFFIXES = (*_READERS, ".parquet")
_EXPECTED = f"{', '.join(SUFFIXES)}, all but the last also with {', '.join(_OPENERS)} behind"


def _kind(path: Path) -> tuple[str, str]:
    """What a file holds and how it is compressed, as suffixes; the first is empty where it cannot be read."""
    name = path.name.lower()
    packed = next((suffix for suffix in _OPENERS if name.endswith(suffix)), "")
    inner = name.removesuffix(packed)
    kind = next((suffix for suffix in SUFFIXES if inner.endswith(suffix)), "")
    return "" if packed and kind == ".parquet" else kind, packed


def find_files(source: Any, setting: str) -> list[Path]:
    """The files that a path, a glob, a folder or a list of them names, each once; globs and folders in sorted order.

    Of a folder all files that can be read, those in folders below it too; what is hidden is left out.

    Raises:
        UserError: nothing found, or a kind of file that cannot be read; names the setting.
    """
    names = [source] if isinstance(source, str | os.PathLike) else list(source)
    found: dict[Path, Path] = {}
    for name in names:
        path = Path(name).expanduser()
        # A name may itself hold brackets: what exists is taken literally.
        matches = [path] if exists(path) else _glob(path)
        if not matches:
            raise UserError(f"{setting}: no file matches {str(name)!r}{_nearby(path)}")
        if path.is_dir():
            matches = _inside(path)
            if not matches:
                raise UserError(f"{setting}: no file in the folder {path} can be read: expected {_EXPECTED}.")
        for match in matches:
            if match.is_dir():
                continue
            if not _kind(match)[0]:
                remedy = " Unpack it first." if match.suffix.lower() in (".zip", ".tar", ".tgz", ".7z") else ""
                raise UserError(f"{setting}: cannot read {match}: expected one of {_EXPECTED}.{remedy}")
            try:
                found.setdefault(match.resolve(), match)
            except RuntimeError:  # what pathlib makes of it before Python 3.13
                raise UserError(f"{setting}: cannot read {match}: it is a link that leads back to itself.") from None
    if not found:
        raise UserError(f"{setting}: names no file.")
    return list(found.values())


def exists(path: Path) -> bool:
    """Whether something is there; of a name that no file can have, nothing is."""
    try:
        return path.exists()
    except OSError:  # too long
        return False


def _glob(path: Path) -> list[Path]:
    # Path.glob refuses absolute patterns.
    return [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207


def _inside(folder: Path) -> list[Path]:
    shown = (path for path in folder.rglob("*") if not any(p.startswith(".") for p in path.relative_to(folder).parts))
    return sorted(path for path in shown if path.is_file() and _kind(path)[0])


def _nearby(path: Path) -> str:
    start = "" if path.is_absolute() else f" (relative paths are taken from {Path.cwd()})"
    try:
        close = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    except OSError:
        return f"{start}. The folder {path.parent} does not exist."
    return f"{start}." + (f" Did you mean {path.parent / close[0]}?" if close else "")


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield (line, row) for every row of a file, with `BadRow` where a row is broken.

    Raises:
        UserError: the file as a whole cannot be read (permissions, damaged archive, no header).
    """
    kind, packed = _kind(path)
    try:
        count = 0
        for count, item in enumerate(_rows_of(path, kind, packed), 1):  # noqa: B007
            yield item
        if not count:
            yield 0, BadRow("the file is empty: it holds no rows")
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, packed, error) from error
    except OSError as error:
        if error.errno is None and packed:  # how bz2 and Arrow tell of bytes that are no archive
            raise _damaged(path, packed, error) from error
        if error.errno is None and kind == ".parquet":
            raise UserError(f"{path}: not a readable Parquet file.") from error
        raise UserError(f"{path}: cannot be read: {error.strerror or type(error).__name__}.") from error


def _rows_of(path: Path, kind: str, packed: str) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    if kind == ".parquet":
        yield from read_parquet(path)
        return
    with _OPENERS[packed](path) if packed else path.open("rb") as stream:
        head = stream.peek(64)
        check_encoding(head[:4], path)
        reader = _READERS[kind]
        # What is published as .json.gz is as often one object a line as a list.
        if packed and kind == ".json" and head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{":
            reader = read_jsonl
        yield from reader(stream, path)


def _damaged(path: Path, packed: str, error: Exception) -> UserError:
    name = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}[packed]
    return UserError(f"{path}: the {name} archive is damaged or cut short ({type(error).__name__}).")
