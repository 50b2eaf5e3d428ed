"""One figure of an evaluation."""

from dataclasses import dataclass, field
from typing import Any, Literal

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
    """

    name: str
    value: float
    low: float
    high: float
    count: int
    better: Better = "higher"
    details: dict[str, Any] = field(default_factory=dict)
