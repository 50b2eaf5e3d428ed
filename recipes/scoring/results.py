"""What an evaluation leaves: `scores.json`, and a section and the metadata of the run's model card."""

import json
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from ..data.sources import HUB
from ..environment import versions
from ..errors import UserError
from ..models import first_line
from ..run_folder import write_text
from .rows import Rows, limited, row_digest
from .score import Score

SCORES, CARD = "scores.json", "README.md"
_BEGIN, _END = "<!-- anyformer eval: begin -->", "<!-- anyformer eval: end -->"


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True)


class _Entry(_Checked):
    name: str
    value: float
    low: float | None
    high: float | None
    count: int
    data: str


class _Data(_Checked):
    digest: str
    remarks: list[str]


class _File(_Checked):
    """What is read of a file of figures."""

    scores: list[_Entry]
    data: dict[str, _Data]


def as_dict(model: str, rows: Rows, scores: Sequence[Score], settings: dict[str, Any]) -> dict[str, Any]:
    """One evaluation in plain values; a bound that is not known is None.

    Args:
        settings: of this evaluation; each figure keeps them, with the model and the versions of the software.
    """
    data = {rows.name: {"digest": rows.digest, "rows": len(rows.rows), "remarks": rows.remarks}}
    measured = _measured(model, settings)
    return {"scores": [_entry(score, rows.name) | measured for score in scores], "data": data}


def of_tasks(model: str, scores: Sequence[Score], settings: dict[str, Any]) -> dict[str, Any]:
    """As `as_dict`; each task of lm-evaluation-harness is data of its own, told apart by what the harness says of it.

    Figures that are no finite numbers are left out, with a remark on the data.

    Raises:
        UserError: no figure is left.
    """
    data: dict[str, Any] = {}
    entries, measured = [], _measured(model, settings)
    for score in scores:
        told = [score.details.get(key) for key in ("task", "version", "num_fewshot", "documents")]
        told += ["chat"] if settings.get("chat") else []
        digest = row_digest({"of": told, "documents": score.count})
        name = limited(f"lm-eval:{Path(score.details['task']).name}", settings["limit"], score.count)
        of = data.setdefault(name, {"digest": digest, "rows": score.count, "remarks": []})
        if math.isfinite(score.value):
            entries.append(_entry(score, name) | measured)
        else:
            of["remarks"].append(f"{score.name} is left out: lm-evaluation-harness gives {score.value}")
    if not entries:
        raise UserError("; ".join(remark for of in data.values() for remark in of["remarks"]))
    return {"scores": entries, "data": data}


def _measured(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What all figures of an evaluation share; `evaluation` finds their rows, see `score_rows`."""
    return {"model": model, "settings": settings, "versions": versions(), "evaluation": uuid4().hex}


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


def read(file: Path) -> dict[str, Any]:
    """The figures of earlier evaluations; none where there is no file.

    Raises:
        UserError: the file is damaged, none of ours, or cannot be read.
    """
    try:
        if not file.exists():
            return {"scores": [], "data": {}}
        known = json.loads(file.read_text(encoding="utf-8"), parse_constant=_no_json)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{file} is damaged: remove it, or name another file with --output") from error
    try:
        _File.model_validate(known)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "the whole"
        raise UserError(
            f"{file} holds no scores of `anyformer eval` ({where}: {fault['msg']}): name another file with --output"
        ) from error
    return known


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def check_file(file: Path) -> None:
    """Make sure that figures can go into a file, before they are measured; nothing is changed.

    Raises:
        UserError: as `read` and `write` do.
    """
    read(file)
    try:
        folder = next(folder for folder in file.absolute().parents if folder.exists())
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error


def write(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Put an evaluation into a file of earlier ones: figures of the same name and data give way, all others stay.

    Other rows under the same name of data get a name of their own, with the beginning of their digest behind it.

    Returns:
        All that the file holds now.

    Raises:
        UserError: the file is none of ours, or cannot be written.
    """
    known = read(file)
    names = {name: _told_apart(name, data, known["data"]) for name, data in found["data"].items()}
    scores = [entry | {"data": names[entry["data"]]} for entry in found["scores"]]
    new = {(entry["data"], entry["name"]) for entry in scores}
    kept = [entry for entry in known["scores"] if (entry["data"], entry["name"]) not in new]
    whole = {"scores": kept + scores, "data": known["data"] | {names[name]: of for name, of in found["data"].items()}}
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
