"""Reading rows from files, with the place of every fault.

Nothing is guessed: JSON is read by the json module, CSV by the csv module, so that a date or a number
written as text stays text. A reason never quotes the content of a row, since data are often private.
"""

import csv
import difflib
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".json", ".csv", ".parquet", ".txt")
_BOM = b"\xef\xbb\xbf"


class BadRow(NamedTuple):
    """Stands in the place of a row that could not be read."""

    reason: str


class Skipped(NamedTuple):
    """A row left out under `on_bad_row: skip`. `line` counts from 1; 0 stands for the whole file."""

    file: str
    line: int
    reason: str


def place(path: str | Path, line: int) -> str:
    """`train.jsonl, line 3`; Parquet has no lines and counts rows."""
    word = "row" if str(path).lower().endswith(".parquet") else "line"
    return f"{path}, {word} {line}" if line else str(path)


def clip(names: Any) -> str:
    """Column names for a message: few and short, since a headless CSV shows content in their place."""
    shown = [str(name)[:40] for name in names]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "") or "none"


def find_files(source: Any, setting: str) -> list[Path]:
    """The files that a path, a glob or a list of them names, each once, globs in sorted order.

    Raises:
        UserError: nothing found, a folder, or a kind of file that cannot be read; names the setting.
    """
    names = [source] if isinstance(source, str | os.PathLike) else list(source)
    found: dict[Path, Path] = {}
    for name in names:
        path = Path(name).expanduser()
        # A name may itself hold brackets: what exists is taken literally.
        matches = [path] if path.exists() else _glob(path)
        if not matches:
            raise UserError(f"{setting}: no file matches {str(name)!r}.{_nearby(path)}")
        for match in matches:
            if match.is_dir():
                if match is path:
                    raise UserError(f"{setting}: {match} is a folder. Give a glob such as {match / '*.jsonl'}.")
                continue
            if not match.name.lower().endswith(SUFFIXES):
                raise UserError(f"{setting}: cannot read {match}: expected one of {', '.join(SUFFIXES)}.")
            found.setdefault(match.resolve(), match)
    if not found:
        raise UserError(f"{setting}: names no file.")
    return list(found.values())


def _glob(path: Path) -> list[Path]:
    # Path.glob refuses absolute patterns.
    return [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207


def _nearby(path: Path) -> str:
    try:
        close = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    except OSError:
        return f" The folder {path.parent} does not exist."
    return f" Did you mean {path.parent / close[0]}?" if close else ""


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield (line, row) for every row of a file, with `BadRow` where a row is broken.

    Raises:
        UserError: the file as a whole cannot be read (permissions, damaged archive, no header).
    """
    name = path.name.lower()
    try:
        if name.endswith((".jsonl", ".gz")):
            rows = _read_jsonl(path)
        else:
            rows = {".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet, ".txt": _read_txt}[
                Path(name).suffix
            ](path)
        count = 0
        for count, item in enumerate(rows, 1):  # noqa: B007
            yield item
        if not count:
            yield 0, BadRow("the file is empty: it holds no rows")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: the gzip archive is damaged or cut short ({type(error).__name__}).") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or type(error).__name__}.") from error


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as stream:
        # A binary stream breaks lines at \n alone; U+2028 and its like occur inside strings.
        for line, raw in enumerate(stream, 1):
            raw = (raw.removeprefix(_BOM) if line == 1 else raw).rstrip(b"\r\n")
            if not raw.strip():
                continue
            try:
                yield line, _as_object(_parse_json(_decode(raw)))
            except _Fault as fault:
                yield line, BadRow(str(fault))


def _read_json(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    raw = path.read_bytes().removeprefix(_BOM)
    try:
        text = _decode(raw)
    except _Fault as fault:
        raise UserError(f"{path}: {fault}.") from None
    start = _skip_blank(text, 0)
    if start == len(text):
        return
    if text[start] != "[":
        hint = ' One object a line? Then the name must end in ".jsonl".' if text[start] == "{" else ""
        raise UserError(f"{path}: expected a list of objects, [{{...}}, {{...}}].{hint}")
    # Item by item, not in one go, so that a fault in one has a line and leaves the others readable.
    line, here, after = 1, 0, _skip_blank(text, start + 1)
    while text[after : after + 1] != "]":
        line += text.count("\n", here, after)
        here = after
        try:
            item, after = _json_item(text, here)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {error.lineno}: {_broken(error)}.") from None
        except (RecursionError, ValueError):
            raise UserError(f"{path}, line {line}: JSON nested too deeply, or a number too long.") from None
        yield line, item
        after = _skip_blank(text, after)
        comma = text[after : after + 1] == ","
        after = _skip_blank(text, after + 1) if comma else after
        closed = text[after : after + 1] == "]"
        if comma == closed:  # a comma before the bracket, or neither of the two
            at = text.count("\n", 0, after) + 1
            raise UserError(f"{path}, line {at}: broken JSON: expected a comma and an object, or the list's end.")
    if _skip_blank(text, after + 1) != len(text):
        at = text.count("\n", 0, after) + 1
        raise UserError(f"{path}, line {at}: broken JSON: text after the end of the list.")


def _json_item(text: str, start: int) -> tuple[dict[str, Any] | BadRow, int]:
    try:
        value, end = _JSON.raw_decode(text, start)
    except _Fault as fault:
        return BadRow(str(fault)), json.JSONDecoder().raw_decode(text, start)[1]
    try:
        return _as_object(value), end
    except _Fault as fault:
        return BadRow(str(fault)), end


def _skip_blank(text: str, index: int) -> int:
    while index < len(text) and text[index] in " \t\n\r":
        index += 1
    return index


def _read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses documents over 128 kB
    # Bad bytes pass as surrogates and are found again below, where the row is known.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end" in str(error) or header is None:
                    why = "a quote opened here is never closed" if header is not None else f"broken header: {error}"
                    raise UserError(f"{path}, line {line}: {why}.") from error
                yield line, BadRow(f"broken CSV: {error}")
                continue
            if header is None and fields:
                header = _csv_header(path, fields)
            elif fields:
                yield line, _csv_row(header or [], fields)


def _csv_header(path: Path, fields: list[str]) -> list[str]:
    if _foreign_bytes(fields):
        raise UserError(f"{path}, line 1: the header is not UTF-8.")
    twice = {name for name in fields if fields.count(name) > 1}
    if twice:
        raise UserError(f"{path}, line 1: the header names a column twice: {clip(sorted(twice))}.")
    return fields


def _csv_row(header: list[str], fields: list[str]) -> dict[str, Any] | BadRow:
    if _foreign_bytes(fields):
        return BadRow("bytes that are not UTF-8: convert the file to UTF-8")
    if len(fields) != len(header):
        return BadRow(f"{len(fields)} fields where the header has {len(header)}")
    return dict(zip(header, fields, strict=True))


def _foreign_bytes(fields: list[str]) -> bool:
    return any("\udc80" <= char <= "\udcff" for text in fields if not text.isascii() for char in text)


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) != len(names):
                raise UserError(f"{path}: the schema names a column twice.")
            row = 0
            for batch in file.iter_batches(batch_size=1000):
                for item in _batch_rows(batch):
                    row += 1
                    yield row, item
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file ({type(error).__name__}).") from error


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | BadRow]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield BadRow("text that is not UTF-8")


def _read_txt(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    raw = path.read_bytes().removeprefix(_BOM)
    if not raw.strip():
        return
    try:
        yield 1, {"text": _decode(raw)}
    except _Fault as fault:
        yield 0, BadRow(str(fault))


class _Fault(Exception):
    """Why a piece of a file cannot be used."""


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        where = f"line {line}, byte {column}" if b"\n" in raw.rstrip() else f"byte {column} of the line"
        raise _Fault(
            f"byte 0x{raw[error.start]:02x} at {where} is not UTF-8: convert the file (Latin-1 or UTF-16?) to UTF-8"
        ) from None


def _parse_json(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except json.JSONDecodeError as error:
        raise _Fault(_broken(error)) from None
    except RecursionError:
        raise _Fault("JSON nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise _Fault("a number is too long") from None


def _broken(error: json.JSONDecodeError) -> str:
    # What stands before the colon is the json module's own; after it may come a piece of the row.
    return f"broken JSON at column {error.colno}: {error.msg.split(':')[0]}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _Fault(f"duplicate key: {clip(sorted({key for key in keys if keys.count(key) > 1}))}")
    return row


def _refuse_constant(name: str) -> None:
    raise _Fault(f"{name} is not JSON: use null or a string")


_JSON = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Fault(f"expected an object with named fields, found {type_name(value)}")
    return value


def type_name(value: Any) -> str:
    """A value's type in the words of JSON."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text"}
    names |= {list: "a list", dict: "an object", bytes: "bytes"}
    return names.get(type(value), f"a {type(value).__name__}")
