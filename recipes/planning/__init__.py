"""What a run will cost: `costs` from its config alone, by going through a step without values; `run` with its data."""

from .run import Plan, describe, make_plan
from .units import BYTES, count, gigabytes

__all__ = ["BYTES", "Plan", "count", "describe", "gigabytes", "make_plan"]
