"""`metrics.csv`: a row for each log of the trainer, written as the run goes."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..run_folder import write_text

# Columns that are always there, in this order; others follow as they first appear.
COLUMNS = (
    "step",
    "epoch",
    "loss",
    "z_loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "tokens_per_second",
    "mfu",
    "data_wait",
    "memory_gb",
)


class MetricsFile:
    """Appends rows; a row with a new column rewrites the file under its longer head."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = list(COLUMNS)

    def begin(self, step: int) -> None:
        """Start the file, or go on after a step: rows behind it, and one that was cut off, are dropped."""
        rows: list[dict[str, Any]] = []
        if step and self.path.is_file():
            rows = [row for row in self._whole_rows() if int(row["step"]) <= step]
        self._rewrite(rows)

    def add(self, values: dict[str, Any]) -> None:
        """A row of the values that are numbers."""
        row = {name: value for name, value in values.items() if isinstance(value, int | float)}
        new = [name for name in row if name not in self.columns]
        if new:
            kept = list(self._whole_rows()) if self.path.is_file() else []
            self.columns += new
            self._rewrite([*kept, row])
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns, restval="", lineterminator="\n").writerow(row)

    def _whole_rows(self) -> Iterable[dict[str, Any]]:
        """The rows, without what a kill left half written: such a row is the last and has no line break."""
        text = self.path.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()
        reader = csv.DictReader(lines)
        self.columns += [name for name in reader.fieldnames or () if name not in self.columns]
        return [row for row in reader if (row["step"] or "").isdigit()]

    def _rewrite(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write the file whole or not at all."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())
