"""The parameters by part, as `anyformer plan` counts them."""

from collections.abc import Iterator
from typing import Any

from ..planning.units import count


def parameters_of(config: Any, head: str) -> dict[str, Any]:
    """Numbers by part, in all, and those that one token uses."""
    counts = config.counts(head=head)
    return {
        "total": counts.total_parameters,
        "active": counts.active_parameters,
        "parts": {part: number for part, number in counts.parameters.items() if number},
    }


def table(parameters: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Rows of name, number and share; the total stands first."""
    total = parameters["total"]
    yield "parameters", f"{total:,}", count(total)
    if parameters["active"] != total:
        yield "of a token", f"{parameters['active']:,}", f"{parameters['active'] / total:.1%}"
    for part, number in parameters["parts"].items():
        yield part, f"{number:,}", f"{number / total:.1%}"


def table_lines(parameters: dict[str, Any]) -> list[str]:
    rows = list(table(parameters))
    wide = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"{name:<{wide[0]}}  {number:>{wide[1]}}  {share:>{wide[2]}}" for name, number, share in rows]
