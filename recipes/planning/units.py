"""Numbers as people write them, and bytes."""

import re

from ..errors import UserError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BYTES_OF = {"": 10**9, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES_OF |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}
MOST = 1e24  # tokens, or operations a second, that anybody plans with
_NUMBER = re.compile(r"(\d+(?:[.,_]\d+)*(?:e[+-]?\d+)?)\s*([a-z]*)")


def count(number: float) -> str:
    """123_456_789 -> 123.5 M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f}"


def gigabytes(number: float) -> str:
    """Bytes as GB (10^9) or MB (10^6)."""
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    for limit, unit in ((86400 * 365.25, "years"), (86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * limit:
            return f"{seconds / limit:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def read_bytes(text: str, where: str) -> int:
    """`80GB` -> 80 * 10^9, `80GiB` -> 80 * 2^30; a number alone counts GB.

    Raises:
        UserError: it is no size.
    """
    number, unit = _parts(text)
    if number is None or unit not in _BYTES_OF or not 1 <= number * _BYTES_OF[unit] <= MOST:
        raise UserError(f"{where}: {text!r} is no size of memory: write 80GB, 24GiB or 512MB")
    return round(number * _BYTES_OF[unit])


def read_count(text: str, where: str) -> float:
    """`15T` -> 15 * 10^12, `1.5e12`, `300M`.

    Raises:
        UserError: it is no number from 1 to `MOST`.
    """
    number, unit = _parts(text)
    if number is None or unit not in _TIMES or not 1 <= number * _TIMES[unit] <= MOST:
        raise UserError(f"{where}: {text!r} is no number from 1 to {MOST:.0e}: write 15T, 300M, 1.5e9 or 20000")
    return number * _TIMES[unit]


def _parts(text: str) -> tuple[float | None, str]:
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None:
        return None, ""
    try:
        return float(match[1].replace(",", "").replace("_", "")), match[2]
    except ValueError:
        return None, ""
