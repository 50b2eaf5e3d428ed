"""Rows to train on and rows held out, in the canonical form of their format.

`sources` says what a recipe may name; `files` and `parsing` read files with the place of every fault, `hub` and
`python_rows` what is no file, and `builtin` holds the data sets that need none. `formats` says what a row may look
like, `reader` makes rows of sources, `holding` holds a share of them out, `stream` reads them without keeping them,
`mixture` says which of them make an epoch, and `splits` puts all together.
"""

from .holding import prompt_key, split_by_prompt
from .mixture import Mixture
from .report import DataReport, SourceReport
from .splits import DataSection, Splits, load_splits
from .stream import RowStream

__all__ = [
    "DataReport",
    "DataSection",
    "Mixture",
    "RowStream",
    "SourceReport",
    "Splits",
    "load_splits",
    "prompt_key",
    "split_by_prompt",
]
