"""Rows of an open file, one reader a kind, with the line of every fault.

Nothing is guessed: JSON is read by the json module, CSV by the csv module, so that a date or a number written as text
stays text, whatever other rows hold. All readers but that of .json and .txt keep no more than a few rows in memory.
"""

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError
from .faults import BadRow, clip, type_name

Rows = Iterator[tuple[int, dict[str, Any] | BadRow]]

_BOM = b"\xef\xbb\xbf"
# Rows that are decoded at once: rows may hold megabytes each.
_BATCH = 64


def read_jsonl(stream: BinaryIO, path: Path) -> Rows:
    # A binary stream breaks lines at \n alone; U+2028 and its like occur inside strings.
    for line, raw in enumerate(stream, 1):
        raw = (raw.removeprefix(_BOM) if line == 1 else raw).rstrip(b"\r\n")
        if not raw.strip():
            continue
        try:
            yield line, _as_object(parse_json(_decode(raw)))
        except Fault as fault:
            yield line, BadRow(str(fault))


def read_json(stream: BinaryIO, path: Path) -> Rows:
    raw = stream.read().removeprefix(_BOM)
    try:
        text = _decode(raw)
    except Fault as fault:
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
    except Fault as fault:
        return BadRow(str(fault)), json.JSONDecoder().raw_decode(text, start)[1]
    try:
        return _as_object(value), end
    except Fault as fault:
        return BadRow(str(fault)), end


def _skip_blank(text: str, index: int) -> int:
    while index < len(text) and text[index] in " \t\n\r":
        index += 1
    return index


def read_csv(stream: BinaryIO, path: Path) -> Rows:
    return _read_table(stream, path, ",")


def read_tsv(stream: BinaryIO, path: Path) -> Rows:
    """As CSV, quotes included, with tabs for commas."""
    return _read_table(stream, path, "\t")


def _read_table(stream: BinaryIO, path: Path, delimiter: str) -> Rows:
    csv.field_size_limit(2**31 - 1)  # the default refuses documents over 128 kB
    # Bad bytes pass as surrogates and are found again below, where the row is known.
    with io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        reader = csv.reader(text, strict=True, delimiter=delimiter)
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
                header = _header(path, fields)
            elif fields:
                yield line, _table_row(header or [], fields)


def _header(path: Path, fields: list[str]) -> list[str]:
    if _foreign_bytes(fields):
        raise UserError(f"{path}, line 1: the header is not UTF-8.")
    twice = {name for name in fields if fields.count(name) > 1}
    if twice:
        raise UserError(f"{path}, line 1: the header names a column twice: {clip(sorted(twice))}.")
    return fields


def _table_row(header: list[str], fields: list[str]) -> dict[str, Any] | BadRow:
    if _foreign_bytes(fields):
        return BadRow("bytes that are not UTF-8: convert the file to UTF-8")
    if len(fields) != len(header):
        return BadRow(f"{len(fields)} fields where the header has {len(header)}")
    return dict(zip(header, fields, strict=True))


def _foreign_bytes(fields: list[str]) -> bool:
    return any("\udc80" <= char <= "\udcff" for text in fields if not text.isascii() for char in text)


def read_parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        # With a buffer, pages are read one after another; without one, a whole column of a row group.
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            if len(set(names)) != len(names):
                raise UserError(f"{path}: the schema names a column twice.")
            row = 0
            for batch in file.iter_batches(batch_size=_BATCH):
                for item in arrow_rows(batch):
                    row += 1
                    yield row, item
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file ({type(error).__name__}).") from error


def arrow_rows(batch: Any) -> Iterator[dict[str, Any] | BadRow]:
    """The rows of a piece of an Arrow table, as plain Python."""
    try:
        yield from batch.to_pylist()
    except (UnicodeDecodeError, ValueError, OverflowError):
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield BadRow("text that is not UTF-8")
            except (ValueError, OverflowError):
                yield BadRow("a timestamp beyond what Python can hold: store it as text")


def read_text(stream: BinaryIO, path: Path) -> Rows:
    raw = stream.read().removeprefix(_BOM)
    if not raw.strip():
        return
    try:
        yield 1, {"text": _decode(raw)}
    except Fault as fault:
        yield 0, BadRow(str(fault))


def check_encoding(head: bytes, path: Path) -> None:
    """Look at the first four bytes of a file of text.

    Raises:
        UserError: it is UTF-16 or UTF-32.
    """
    wide = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
    for mark, name in wide.items():
        if head.startswith(mark):
            raise UserError(f"{path}: is {name}, by its first bytes: convert the file to UTF-8.")
    if b"\0" in head:
        raise UserError(f"{path}: begins with null bytes, as UTF-16 does: convert the file to UTF-8.")


class Fault(Exception):
    """Why a piece of a file cannot be used."""


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        where = f"line {line}, byte {column}" if b"\n" in raw.rstrip() else f"byte {column} of the line"
        raise Fault(
            f"byte 0x{raw[error.start]:02x} at {where} is not UTF-8: convert the file (Latin-1 or UTF-16?) to UTF-8"
        ) from None


def parse_json(text: str) -> Any:
    """A value as JSON has it.

    Raises:
        Fault: it is none, or has a key twice or a number that nothing could hold.
    """
    try:
        return _JSON.decode(text)
    except json.JSONDecodeError as error:
        raise Fault(_broken(error)) from None
    except RecursionError:
        raise Fault("JSON nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise Fault("a number is too long") from None


def _broken(error: json.JSONDecodeError) -> str:
    # What stands before a colon and a space is the json module's own; after it may come a piece of the row.
    return f"broken JSON at column {error.colno}: {error.msg.split(': ')[0]}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise Fault(f"duplicate key: {clip(sorted({key for key in keys if keys.count(key) > 1}))}")
    return row


def _refuse_constant(name: str) -> None:
    raise Fault(f"{name} is not JSON: use null or a string")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise Fault("a number is too large: store it as text")
    return number


_JSON = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite)


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault(f"expected an object with named fields, found {type_name(value)}")
    return value
