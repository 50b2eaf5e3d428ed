"""Files of rows, and the `data` section of a recipe that names them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anyformer.recipes.data import load_splits

SECRET = "hunter2"
# What supervised fine-tuning takes.
SFT = ("messages", "prompt-completion", "text")
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def section(source: Any, **changed: Any) -> SimpleNamespace:
    settings = {
        "source": source,
        "format": "auto",
        "columns": {},
        "on_bad_row": "error",
        "max_rows": None,
        "epoch_rows": None,
        "streaming": False,
        "eval_source": None,
        "eval_fraction": 0.0,
        "max_eval_rows": None,
        "truncation": "drop",
        "seed": 0,
    }
    assert not changed.keys() - settings.keys()
    return SimpleNamespace(**(settings | changed))


def rows_of(source: Any, accepts: Any = None, **changed: Any) -> list[dict[str, Any]]:
    return load_splits(section(source, **changed), accepts).train


def pairs(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"Question {i}?", "completion": f"Answer {i}."} for i in range(count)]


def write_rows(folder: Path, name: str, content: str | bytes | list[dict[str, Any]]) -> str:
    """Write a file, rows as JSON lines, and return its path."""
    if isinstance(content, list):
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)
