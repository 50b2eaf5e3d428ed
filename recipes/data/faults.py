"""How a row that cannot be used is named: its place, and values and columns in words that quote no content."""

import datetime
import decimal
import re
from pathlib import Path
from typing import Any, NamedTuple

# What has no lines: Parquet, the rows of a function, a data set of the Hub.
_COUNTED = re.compile(r"\.parquet$|\.py:\w+$|^hub:", re.IGNORECASE)


class BadRow(NamedTuple):
    """Stands in the place of a row that could not be read."""

    reason: str


class Skipped(NamedTuple):
    """A row left out under `on_bad_row: skip`. `line` counts from 1; 0 stands for the whole file."""

    file: str
    line: int
    reason: str


def place(path: str | Path, line: int) -> str:
    """`train.jsonl, line 3`; what has no lines counts rows."""
    word = "row" if _COUNTED.search(str(path)) else "line"
    return f"{path}, {word} {line}" if line else str(path)


def clip(names: Any) -> str:
    """Column names for a message: few and short, since a headless CSV shows content in their place."""
    # A terminal would obey what is no character to print.
    shown = ["".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(name)[:40]) for name in names]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "") or "none"


def type_name(value: Any) -> str:
    """A value's type in the words of JSON; of Arrow's types those that JSON has not."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text"}
    names |= {list: "a list", dict: "an object", bytes: "bytes", decimal.Decimal: "a decimal number"}
    if isinstance(value, datetime.datetime):
        return "a timestamp, which could be written in several ways: store it as text"
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return f"a {type(value).__name__}, which could be written in several ways: store it as text"
    return names.get(type(value), f"a {type(value).__name__}")
