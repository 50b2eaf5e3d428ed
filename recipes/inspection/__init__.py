"""What a recipe would train on, before a weight is loaded: figures and rows, in the terminal, as one page, as JSON."""

from .collect import Inspection, inspect_recipe

__all__ = ["Inspection", "inspect_recipe"]
