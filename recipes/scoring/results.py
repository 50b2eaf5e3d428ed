"""What an evaluation leaves: `scores.json`, and a section and the metadata of the run's model card."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.sources import HUB
from ..environment import versions
from ..errors import UserError
from ..models import first_line
from ..run_folder import Record, write_text
from .rows import Rows, row_digest
from .score import Score

SCORES, CARD = "scores.json", "README.md"
_BEGIN, _END = "<!-- anyformer eval: begin -->", "<!-- anyformer eval: end -->"


def as_dict(model: str, rows: Rows, scores: Sequence[Score], settings: dict[str, Any]) -> dict[str, Any]:
    """One evaluation in plain values; a bound that is not known is None."""
    data = {rows.name: {"digest": rows.digest, "rows": len(rows.rows), "remarks": rows.remarks}}
    return _whole(model, [_entry(score, rows.name) for score in scores], data, settings)


def of_tasks(model: str, scores: Sequence[Score], settings: dict[str, Any]) -> dict[str, Any]:
    """As `as_dict`; each task of lm-evaluation-harness is data of its own, told apart by what the harness says of it.

    Raises:
        UserError: a figure that is no number.
    """
    entries, data = [], {}
    for score in scores:
        if not math.isfinite(score.value):
            raise UserError(f"{score.name}: lm-evaluation-harness gives {score.value}, which is no finite number")
        told = [score.details[key] for key in ("task", "version", "num_fewshot")]
        digest = row_digest({"of": told, "documents": score.count})
        name = f"lm-eval:{Path(score.details['task']).name}"
        data[name] = {"digest": digest, "rows": score.count, "remarks": []}
        entries.append(_entry(score, name))
    return _whole(model, entries, data, settings)


def _whole(model: str, entries: list[dict[str, Any]], data: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:

    return {"scores": entries, "model": model, "data": data, "versions": versions(), "settings": settings}


def _entry(score: Score, data: str) -> dict[str, Any]:
    low, high = (bound if math.isfinite(bound) else None for bound in (score.low, score.high))
    return {
        "name": score.name,
        "value": score.value,
        "low": low,
        "high": high,
        "count": score.count,
        "better": score.better,
        "details": {key: None if _no_number(value) else value for key, value in score.details.items()},
        "data": data,
    }


def _no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def write(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Put an evaluation into a file of earlier ones: figures of the same name and data give way, all others stay.

    Other rows under the same name of data get a name of their own, with the beginning of their digest behind it.

    Returns:
        All that the file holds now.

    Raises:
        UserError: the file is none of ours, or cannot be written.
    """
    record = Record(file)
    try:
        known = record.values
    except UserError as error:
        raise UserError(f"{file} is damaged: remove it, or name another file with --output") from error
    if known and not isinstance(known.get("scores"), list):
        raise UserError(f"{file} holds no scores: name another file with --output")
    names = {name: _told_apart(name, data, known.get("data", {})) for name, data in found["data"].items()}
    scores = [entry | {"data": names[entry["data"]]} for entry in found["scores"]]
    new = {(entry["data"], entry["name"]) for entry in scores}
    kept = [entry for entry in known.get("scores", []) if (entry["data"], entry["name"]) not in new]
    data = known.get("data", {}) | {names[name]: of for name, of in found["data"].items()}
    whole = known | found | {"scores": kept + scores, "data": data}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error
    return whole


def _told_apart(name: str, data: dict[str, Any], known: dict[str, Any]) -> str:
    """The name of data, with their digest where others have that name already."""
    same = known.get(name, data)["digest"] == data["digest"]
    return name if same else f"{name} ({data['digest'][:8]})"


def bounds(low: float | None, high: float | None) -> str:
    """An interval as a person reads it."""
    unknown = low is None or high is None or not math.isfinite(high - low)
    return "–" if unknown else f"{low:.4g} to {high:.4g}"


def write_card(folder: Path, found: dict[str, Any]) -> None:
    """Put all figures into the model card of a run: one section, which is replaced, and its `model-index`.

    Raises:
        UserError: the card cannot be read, as after an edit by hand, or not be written.
    """
    file = folder / CARD
    if not file.is_file():
        return
    try:
        write_text(file, _with_figures(file.read_text(encoding="utf-8"), folder.name, found))
    except Exception as error:  # of YAML, of the Hub's own checks, of the disk
        raise UserError(
            f"{file} does not take the figures, which are in {SCORES}: {first_line(error)}. Mend its metadata, or "
            "remove it"
        ) from error


def _with_figures(text: str, name: str, found: dict[str, Any]) -> str:
    from huggingface_hub import EvalResult, ModelCard

    card = ModelCard(text, ignore_metadata_errors=True)
    data: Any = card.data
    data.model_name = name
    data.eval_results = [
        EvalResult(
            task_type=getattr(card.data, "pipeline_tag", None) or "other",
            dataset_type=_data_set(entry["data"]),
            dataset_name=entry["data"],
            metric_type=entry["name"].replace(" ", "_").lower(),
            metric_name=entry["name"],
            metric_value=entry["value"],
        )
        for entry in found["scores"]
    ]
    section, body = _section(found), card.text
    if _BEGIN in body and _END in body:
        body = body.split(_BEGIN, 1)[0] + section + body.split(_END, 1)[1]
    else:
        before, use, after = body.partition("\n## Use")
        body = f"{before}\n{section}\n{use}{after}" if use else f"{body}\n{section}\n"
    return f"---\n{data.to_yaml()}\n---\n{body}"


def _data_set(name: str) -> str:
    """What the Hub is told of the data: their id there, or a name in the form of one."""
    if name.startswith(HUB):
        return name.removeprefix(HUB).split()[0]
    return re.sub(r"\W+", "-", name).strip("-").lower() or "data"


def _section(found: dict[str, Any]) -> str:
    rows = [
        f"| {_cell(entry['data'])} | {entry['name']} | {entry['value']:.4g} | {bounds(entry['low'], entry['high'])} | "
        f"{entry['count']:,} |"
        for entry in found["scores"]
    ]
    remarks = [f"- {_cell(name)}: {text}" for name, data in found["data"].items() for text in data["remarks"]]
    parts = [
        f"{_BEGIN}\n## Evaluation\n",
        "| data | metric | value | 95 % interval | rows |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n",
        *(["\n".join(remarks) + "\n"] if remarks else []),
        f"Measured with `anyformer eval`; the details are in `{SCORES}`.\n{_END}",
    ]
    return "\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
