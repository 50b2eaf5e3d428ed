"""The families that are imported and exported: what they are, and how far each is from its stock class."""

import difflib
import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .console import quiet_libraries
from .errors import UserError

if TYPE_CHECKING:
    from ..modeling.interop import Family

# In fp32 what differs is the order of additions.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Measured:
    """A family against its stock class, over all its examples.

    Attributes:
        difference: largest absolute difference of the outputs, on every kind of batch.
        generated: the greedy tokens are those of the stock class; None: its first class does not generate.
        round_trip: weights come back bit-equal, the config unchanged.
        error: what stopped the measurement.
    """

    difference: float = math.nan
    generated: bool | None = None
    round_trip: bool = False
    error: str | None = None

    @property
    def equal(self) -> bool:
        return self.error is None and self.difference <= TOLERANCE and self.generated is not False and self.round_trip


def find_families(names: Sequence[str] = ()) -> "list[Family]":
    """The families of these model types, in the order given; all of them, by name, where none is given.

    Raises:
        UserError: a name that is no family, with those that are near.
    """
    from ..modeling.interop import FAMILIES

    for name in names:
        if name not in FAMILIES:
            near = difflib.get_close_matches(name.lower(), FAMILIES, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(FAMILIES))}"
            raise UserError(f"no family is called {name!r}; {hint}")
    return [FAMILIES[name] for name in dict.fromkeys(names) or sorted(FAMILIES)]


def describe(family: "Family") -> str:
    """What the family is: the first line of its file."""
    from ..modeling.interop import families

    for module in vars(families).values():
        if inspect.ismodule(module) and getattr(module, "FAMILY", None) is family:
            return (module.__doc__ or "").strip().partition("\n")[0].removesuffix(".")
    return ""


def measure(family: "Family") -> Measured:
    """Compare tiny random models of every example of the family with the stock class."""
    from ..modeling.interop.parity import max_of
    from ..modeling.interop.parity import measure as measure_one

    quiet_libraries()
    try:
        found = [measure_one(family, example) for example in family.examples]
    except Exception as error:  # whatever a stock class of another release raises: the other families still count
        return Measured(error=f"{type(error).__name__}: {error}")
    generated = [parity.generated for parity in found if parity.generated is not None]
    return Measured(
        max_of(parity.difference for parity in found),
        all(generated) if generated else None,
        all(parity.round_trip for parity in found),
    )


def rows(families: "Iterable[Family]", measured: Sequence[Measured] = ()) -> list[list[str]]:
    """A table as text, its header first: family, what it is, classes, and the figures where there are some."""
    header = ["family", "what it is", "classes"]
    body = [[family.model_type, describe(family), ", ".join(family.heads.values())] for family in families]
    if measured:
        header += ["difference", "generation equal", "round trip"]
        for row, found in zip(body, measured, strict=True):
            difference = "failed" if found.error else f"{found.difference:.1e}"
            row += [difference, _word(found.generated), "-" if found.error else _word(found.round_trip)]
    return [header, *body]


def _word(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    """A table of `rows` in markdown, names as code."""
    header, *body = table
    lines = [header, ["---"] * len(header)]
    for family, what, classes, *figures in body:
        lines.append([f"`{family}`", what, f"`{classes.replace(', ', '`, `')}`", *figures])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_text(table: Sequence[Sequence[str]]) -> str:
    """A table of `rows` for a terminal: with figures a line for each family, without them its classes below it."""
    width = max(len(row[0]) for row in table)
    if len(table[0]) == 3:
        return "\n".join(f"{name:<{width}}  {what}\n{'':<{width}}  {classes}" for name, what, classes in table[1:])
    return "\n".join(
        f"{name:<{width}}  {gap:<10}  {generated:<16}  {back:<10}  {what}"
        for name, what, _, gap, generated, back in table
    )
