"""What a run keeps of each held-out row."""

import json
from pathlib import Path

import pytest

from anyformer.recipes.held_rows import kept_rows
from anyformer.recipes.run_folder import METRICS


def check_kept_rows(folder: Path) -> None:
    """All figures of a finished run are those that its kept rows make."""
    metrics = json.loads((folder / METRICS).read_text(encoding="utf-8"))
    shown = set(metrics["measured"]["shown"]) - {"perplexity"}  # which is made of the loss
    for when in ("before", "after"):
        found = kept_rows(folder)[when].figures()
        assert {name: found[name] for name in shown} == pytest.approx({name: metrics[when][name] for name in shown})
