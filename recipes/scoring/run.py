"""The verb `eval`: a model on data, to figures with their intervals."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..console import quiet_datasets, quiet_libraries
from ..errors import UserError
from .harness import require_harness, run_harness
from .kinds import Chosen, Job, Settings, Tell, accepted, check_settings, choose
from .results import SCORES, as_dict, bounds, check_file, of_tasks, write, write_card
from .rows import Rows, read_held_out, read_named
from .score import Score
from .score_rows import check_rows_file, keep_rows
from .subject import Subject, open_subject, run_of

Report = Callable[[dict[str, Any]], None]


def evaluate(
    path: str,
    on: str | None = None,
    *,
    metrics: Sequence[str] = (),
    limit: int | None = None,
    settings: Settings | None = None,
    output: Path | None = None,
    trust_remote_code: bool = False,
    tell: Tell = lambda text: print(text, file=sys.stderr),
    report: Report = lambda found: None,
) -> dict[str, Any]:
    """Measure a model and write down what it is worth, in the folder of its run or in `output`.

    Args:
        path: a run, a model folder or a Hub id.
        on: what `data.source` of a recipe takes; None: the rows that the run held out.
        metrics: by name, see `kinds.KINDS`; none: what is usual for the model and the rows.
        limit: of so many rows alone.
        output: the file for the figures; default: `scores.json` in a run's folder, and nothing is written elsewhere.
        report: is given the figures before they are written, so that none are lost where that fails.

    Returns:
        The figures as `results.as_dict` has them.

    Raises:
        UserError: a model, rows, settings or a file for the figures that cannot be used.
    """
    quiet_libraries()
    quiet_datasets()
    settings = settings or Settings()
    check_settings(metrics, settings)
    _check_target(path, output)
    subject = open_subject(path, trust_remote_code=trust_remote_code)
    chosen = choose(metrics, subject.head)
    rows = _rows_for(subject, chosen, on, bool(metrics), limit)
    for remark in rows.remarks:
        tell(remark)
    scores: list[Score] = []
    for kind, wanted in chosen:
        if rows.format in kind.formats[subject.head]:
            scores += kind.measure(Job(subject, rows.rows, rows.format, wanted, settings, tell))
    asked = {"on": on, "metrics": list(metrics), "limit": limit, **settings.as_dict()}
    found = as_dict(path, rows, scores, asked)
    report(found)
    _keep(found, scores, subject, output)
    return found


def evaluate_tasks(
    path: str,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    batch_size: int = 8,
    output: Path | None = None,
    trust_remote_code: bool = False,
    tell: Tell = lambda text: print(text, file=sys.stderr),
    report: Report = lambda found: None,
) -> dict[str, Any]:
    """Measure a model by tasks of lm-evaluation-harness; the figures are kept as those of `evaluate`.

    Args:
        tasks: as `harness.run_harness` takes them.
        limit: of the documents of each task, the first.
        num_fewshot: examples before each document; None: the task's own.
        chat: documents go through the model's chat template.

    Raises:
        UserError: the harness is not installed, no such task, a model that does not write, or a file for the figures
            that cannot be used.
    """
    quiet_libraries()
    quiet_datasets()
    require_harness()
    _check_target(path, output)
    subject = open_subject(path, trust_remote_code=trust_remote_code)
    if subject.head not in ("decoder", "encoder-decoder"):
        raise UserError(
            f"--tasks: lm-evaluation-harness measures models that write, and {path} is a {subject.head}: "
            "measure it on rows, with --on"
        )
    scores = run_harness(
        subject.model,
        subject.tokenizer,
        tasks,
        batch_size=batch_size,
        limit=limit,
        num_fewshot=num_fewshot,
        apply_chat_template=chat,
    )
    asked = {"tasks": list(tasks), "limit": limit, "num_fewshot": num_fewshot, "chat": chat, "batch_size": batch_size}
    found = of_tasks(path, scores, asked)
    for data in found["data"].values():
        for remark in data["remarks"]:
            tell(remark)
    report(found)
    _keep(found, scores, subject, output)
    return found


def _check_target(path: str, output: Path | None) -> None:
    """What `_keep` writes to, before a model is opened."""
    if output is not None:
        check_file(output)
    elif (run := run_of(path)) is not None:
        check_file(run / SCORES)
        check_rows_file(run)


def _keep(found: dict[str, Any], scores: Sequence[Score], subject: Subject, output: Path | None) -> None:
    """In the file that the user names, or in the folder of the model's run and on its card."""
    if output is not None:
        write(output, found)
    elif subject.run is not None:
        whole = write(subject.run / SCORES, found)
        keep_rows(subject.run, whole, found, scores)
        write_card(subject.run, whole)


def _rows_for(subject: Subject, chosen: Sequence[Chosen], on: str | None, asked: bool, limit: int | None) -> Rows:
    formats = accepted(chosen, subject.head, asked)
    if on is not None:
        return read_named(on, formats, limit, subject.run)
    if subject.run is None:
        raise UserError(f"{subject.path} is no run's folder, so it held no rows out: name some with --on")
    return read_held_out(subject.run, formats, limit)


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """Print the figures: as a table, or as JSON."""
    if as_json:
        json.dump(found, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        sys.stdout.write("\n")
        return
    table = [("metric", "value", "95 % interval", "rows")]
    for entry in found["scores"]:
        interval = bounds(entry["low"], entry["high"])
        table.append((entry["name"], f"{entry['value']:.4g}", interval, f"{entry['count']:,}"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
