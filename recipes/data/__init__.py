"""Rows to train on and rows held out: from files and built-in data sets, in the canonical form of their format.

`files` reads them with the place of every fault, `formats` says what a row may look like, `builtin` holds the data sets
that need no file, and `splits` puts them together.
"""

from .splits import DataReport, DataSection, Splits, load_splits, prompt_key, split_by_prompt

__all__ = ["DataReport", "DataSection", "Splits", "load_splits", "prompt_key", "split_by_prompt"]
