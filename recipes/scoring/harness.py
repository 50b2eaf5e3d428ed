"""Tasks of lm-evaluation-harness (Gao et al. 2024, zenodo:12608602; package `lm_eval`) on our models, which it runs
as its class `hf` does any other. Ready tasks on data that need no hub are in `tasks/`.

On its own command line: `python -c "import anyformer; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"` with
`--model hf --model_args pretrained=FOLDER --include_path` and the folder that `TASKS` names; the import registers the
model with the Auto classes.
"""

import importlib.util
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..models import first_line
from .intervals import interval
from .rows import row_digest
from .score import Score
from .statistics import ByRow, Statistic, exp_ratio, ratio

TASKS = Path(__file__).with_name("tasks")
_NORMAL = 1.959963984540054
_ROUNDS = 1000  # of the harness's own bootstrap, where it has no closed formula
# Shares, whose bounds end at 0 and 1.
_SHARES = ("acc", "acc_norm", "exact_match")
# Figures that the harness gives no error of; it logs sum and weight of each document.
_WEIGHTED: dict[str, Statistic] = {
    "word_perplexity": exp_ratio,
    "byte_perplexity": exp_ratio,
    "bits_per_byte": lambda sums: ratio(sums) / math.log(2),
}


def shipped_tasks() -> list[str]:
    """Names of the tasks that are part of this package."""
    return sorted(file.stem for file in TASKS.glob("*.yaml"))


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    batch_size: int = 8,
    limit: int | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
) -> list[Score]:
    """Run tasks of lm-evaluation-harness on a loaded model.

    Args:
        tasks: of `shipped_tasks`, YAML files of one's own, or names that the harness itself knows, most of which fetch
            their data from the Hub.
        limit: of the documents of each task, the first.
        num_fewshot: examples before each document; default: the task's own.

    Returns:
        Each metric of each task, and of each group of tasks. Bounds are 1.96 standard errors, as the harness gives
        them, from the value; of perplexities, where it gives none, those of drawing the documents again; nan where
        there is neither. `details`: `task`, `metric`, `filter`, `standard_error`, `version` and `num_fewshot`.

    Raises:
        UserError: the package is not installed, an encoder, an unknown task, or one whose data cannot be had or which
            would run code of the model.
    """
    require_harness()
    if getattr(model.config, "architecture", None) == "encoder":
        raise UserError("lm-evaluation-harness measures models that write; this one is an encoder")
    if apply_chat_template and not tokenizer.chat_template:
        raise UserError("--chat: the model's tokenizer has no chat template: leave it out")
    manager = _manager(tasks)
    with _quiet():
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        backend = "seq2seq" if model.config.is_encoder_decoder else "causal"
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, backend=backend, batch_size=batch_size)
        try:
            found = simple_evaluate(
                wrapped,
                tasks=list(tasks),
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=apply_chat_template,
                bootstrap_iters=_ROUNDS,
                task_manager=manager,
            )
        except UserError:
            raise
        except Exception as error:  # of somebody's task, its data or its templates: any kind
            raise UserError(f"lm-evaluation-harness, {', '.join(tasks)}: {first_line(error)}") from error
    assert found is not None
    return list(_scores(found))


def require_harness() -> None:
    """Raises:
    UserError: lm-evaluation-harness is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "tasks of lm-evaluation-harness need the package lm_eval, which is not installed: "
            "pip install 'anyformer[harness]'"
        )


def _manager(tasks: Sequence[str]) -> Any:
    """What finds tasks; the harness's own, many thousands, are looked through only where one of them is asked for.

    Raises:
        UserError: no such task.
    """
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise UserError(f"no task is named; shipped: {', '.join(shipped_tasks())}")
    with _quiet():
        manager = TaskManager(include_path=str(TASKS), include_defaults=False)
        if not _unknown(tasks, manager):
            return manager
        manager = TaskManager(include_path=str(TASKS))
    if unknown := _unknown(tasks, manager):
        raise UserError(
            f"lm-evaluation-harness has no task {unknown[0]!r}, and there is no such file; shipped with this package: "
            f"{', '.join(shipped_tasks())}"
        )
    return manager


def _unknown(tasks: Sequence[str], manager: Any) -> list[str]:
    return [task for task in tasks if task not in manager.task_index and not Path(task).is_file()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the harness tells of its settings."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _scores(found: dict[str, Any]) -> Iterator[Score]:
    for task, figures in found["results"].items():
        count = found["n-samples"].get(task, {}).get("effective", figures.get("sample_len", 0))
        for key, value in figures.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            samples = found["samples"].get(task, [])
            values = _values(samples, metric, name)
            error = figures.get(f"{metric}_stderr,{name}")
            error = float(error) if isinstance(error, int | float) else math.nan
            low, high = value - _NORMAL * error, value + _NORMAL * error
            if metric in _SHARES:
                low, high = max(low, 0.0), min(high, 1.0)
            if math.isnan(error) and metric in _WEIGHTED:
                low, high = _redrawn(values, metric)
            rising = found["higher_is_better"].get(task, {}).get(metric)
            yield Score(
                name=" ".join([task, metric, *([] if name == "none" else [name])]),
                value=float(value),
                low=float(low),
                high=float(high),
                count=count,
                better="lower" if rising is False else "higher",
                details={
                    "task": task,
                    "metric": metric,
                    "filter": name,
                    "standard_error": error,
                    "version": found["versions"].get(task),
                    "num_fewshot": found["n-shot"].get(task),
                    "documents": row_digest({"of": [sample.get("doc_hash") for sample in samples]}),
                },
                by_row=_by_row(values, float(value), metric),
            )


def _values(samples: Sequence[dict[str, Any]], metric: str, name: str) -> list[Any]:
    """What the harness logs of each document."""
    return [sample[metric] for sample in samples if sample.get("filter", name) == name and metric in sample]


def _by_row(values: Sequence[Any], figure: float, metric: str) -> ByRow | None:
    """What documents add to a figure; None where it is made in a way of the harness's own."""
    try:
        if metric in _WEIGHTED:
            sums, statistic = [(-total, weight) for total, weight in values], "exp_ratio"
        else:
            sums, statistic = [(float(value), 1.0) for value in values], "ratio"
    except (TypeError, ValueError):
        return None
    found = ByRow(np.array(sums, dtype=np.float64).reshape(-1, 2), statistic)
    return found if len(sums) > 1 and math.isclose(found.value, figure, rel_tol=1e-6, abs_tol=1e-12) else None


def _redrawn(values: Sequence[tuple[float, float]], metric: str) -> tuple[float, float]:
    if len(values) < 2:
        return math.nan, math.nan
    return interval(np.array([(-total, weight) for total, weight in values]), _WEIGHTED[metric])
