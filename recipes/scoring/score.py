"""One figure of an evaluation."""

from dataclasses import dataclass, field
from typing import Any, Literal

from .statistics import ByRow

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Score:
    """A figure, and how sure it is.

    Attributes:
        name: as "perplexity per token", "exact match" or "pass@1".
        value: in units of its definition; shares are from 0 to 1.
        low, high: bounds of its 95 % interval, see `intervals`.
        count: independent units that it is a mean of: rows, texts or problems.
        better: whether a higher or a lower figure is the better one.
        details: what else is worth keeping, as the number of tokens.
        by_row: what each row of the data adds to it; None where that is not known, or rows were left out.
    """

    name: str
    value: float
    low: float
    high: float
    count: int
    better: Better = "higher"
    details: dict[str, Any] = field(default_factory=dict)
    by_row: ByRow | None = None

    @classmethod
    def of(
        cls,
        name: str,
        by_row: ByRow,
        *,
        bounds: tuple[float, float] | None = None,
        better: Better = "higher",
        details: dict[str, Any] | None = None,
    ) -> "Score":
        """The figure that the rows make; bounds are those of a bootstrap, if no others are given."""
        low, high = bounds or by_row.bounds()
        return cls(name, by_row.value, low, high, len(by_row.rows), better, details or {}, by_row)
