"""What a run will cost, from its config alone."""

from .run import Plan, describe, make_plan
from .units import BYTES, count, gigabytes

__all__ = ["BYTES", "Plan", "count", "describe", "gigabytes", "make_plan"]
