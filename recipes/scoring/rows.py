"""Rows to evaluate on: those that the user names, or those that a run held out."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..errors import UserError
from ..run_folder import RECIPE, RunFolder
from .meter import counted

if TYPE_CHECKING:
    from ..data import Splits

Row = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """Rows in the canonical form of their format.

    Attributes:
        name: what they are called beside the figures.
        remarks: what a reader of the figures has to know.
    """

    name: str
    format: str
    rows: list[Row]
    remarks: list[str] = field(default_factory=list)

    @cached_property
    def digest(self) -> str:
        """Of the rows in their order."""
        return hashlib.blake2b("".join(map(row_digest, self.rows)).encode(), digest_size=16).hexdigest()


def row_digest(row: Row) -> str:
    """Of all that a row says."""
    text = json.dumps(row, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def read_named(on: str, accepts: Sequence[str], limit: int | None, run: Path | None) -> Rows:
    """The rows that `--on` names: whatever a recipe's `data.source` may say, a mapping or a list as YAML.

    Args:
        run: the run that made the model; rows that it was trained on are counted.

    Raises:
        UserError: there are none, or none of a form that is accepted.
    """
    from ..checks import explain
    from ..data import load_splits
    from ..schema.sections import DataSection
    from ..yaml_tree import dotted

    data = {"source": _value(on), "eval_fraction": 0.0, "max_rows": limit}
    try:
        splits = load_splits(DataSection.model_validate(data), accepts)
    except ValidationError as error:
        faults = explain(error, data, DataSection)
        raise UserError("\n".join(_in_words(f"{dotted(where)}: {text}") for where, text in faults)) from error
    except UserError as error:
        raise UserError(_in_words(str(error))) from error
    rows = list(splits.train)
    remarks = [f"{counted(splits.report.rows_skipped, 'row')} could not be used"] if splits.report.rows_skipped else []
    name = limited(on, limit, len(rows))
    return Rows(name, splits.report.format, rows, remarks + _overlap(run, rows))


def limited(name: str, limit: int | None, count: int) -> str:
    """The name of data with the limit in it, where it was reached: the name alone is that of all rows."""
    return name if limit is None or count < limit else f"{name} (limit {limit})"


def _value(on: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not on.startswith(("{", "[")):
        return on
    try:
        return YAML(typ="safe").load(on)
    except YAMLError as error:
        raise UserError(f"--on: {on} is no YAML: write {{hub: user/name, split: test}}") from error


# What messages on a recipe say -> what it is called here.
_WORDS = {
    r"^source(?=[.:])": "--on",
    r"data\.source": "--on",
    r"data\.max_rows": "--limit",
    r"data\.columns": "columns, in a mapping,",
    r"data\.on_bad_row: skip": "on_bad_row: skip, in a mapping,",
    r"the objective cannot": "these metrics cannot",
}


def _in_words(text: str) -> str:
    """A message on a recipe's keys, as the command line calls them."""
    for found, ours in _WORDS.items():
        text = re.sub(found, ours, text, flags=re.MULTILINE)
    return text


def read_held_out(run: Path, accepts: Sequence[str], limit: int | None) -> Rows:
    """The rows that a run held out.

    Raises:
        UserError: there are none, the data are not what the run had, or they are of no form that is accepted.
    """
    splits = _splits_of(run)
    if not splits.eval:
        raise UserError(f"{run} held no rows out: name some with --on")
    if splits.report.format not in accepts:
        raise UserError(
            f"{run} held out rows of {splits.report.format}, and these metrics take {' or '.join(accepts)}: name "
            "other rows with --on"
        )
    rows = list(splits.eval)[:limit]
    trained = _digests(splits) if isinstance(splits.train, list) else set()
    name = limited("held out", limit, len(splits.eval) - 1)  # of all rows it is no limit
    return Rows(name, splits.report.format, rows, _counted(rows, trained))


def _splits_of(run: Path) -> "Splits":
    """What a run was trained on and what it held out.

    Raises:
        UserError: it cannot be read any more, or has changed.
    """
    from ..data import load_splits
    from ..loading import load_recipe
    from ..objectives import objective_class

    recipe = load_recipe(run / RECIPE)
    splits = load_splits(recipe.data, accepts=objective_class(recipe.objective.kind).formats)
    known = RunFolder(run).metrics.get("data_digest")
    if known not in (None, splits.digest):
        raise UserError(f"the data of {run} have changed since: which rows it held out cannot be told. Use --on")
    return splits


def _digests(splits: "Splits") -> set[str]:
    return {row_digest(row) for row in splits.train}


def _overlap(run: Path | None, rows: Iterable[Row]) -> list[str]:
    if run is None:
        return []
    try:
        splits = _splits_of(run)
    except UserError as error:
        return [f"not compared with this run's training data: {str(error).splitlines()[0]}"]
    if not isinstance(splits.train, list):  # a stream, or shards of tokens: to look at each would take as long
        return ["not compared with this run's training data, which are not held in memory"]
    return _counted(list(rows), _digests(splits))


def _counted(rows: Sequence[Row], trained: set[str]) -> list[str]:
    seen = sum(row_digest(row) in trained for row in rows)
    return [f"{seen} of {len(rows)} rows are in this run's training data"] if seen else []
