"""Classes of texts and of words against those of the rows: accuracy, macro F1, and F1 of spans."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from ..evaluation import evaluating
from ..label_metrics import accuracy, macro_f1, marks_spans, span_f1, spans
from ..tokens.labelled import checked_label, class_name, tokenize_texts, tokenize_words
from ..tokens.padding import by_length
from ..tokens.report import IGNORE, TokenizedData
from .intervals import interval, ratio, share_interval
from .kinds import Job, Kind, Row
from .meter import Meter
from .score import Score

# Of each row the classes that it has and those that the model gives: one, or one for each word.
Classes = list[list[int]]


def measure(job: Job) -> list[Score]:
    """Figures of the likeliest classes.

    Raises:
        UserError: a head that gives no single class, or a label that it does not know.
    """
    config: Any = job.subject.model.config
    regression = job.subject.head == "classifier" and config.num_labels == 1
    problem = config.problem_type or ("regression" if regression else "single_label_classification")
    if problem != "single_label_classification":
        raise UserError(f"{job.subject.path}: is made for {problem}: accuracy and macro F1 are of one class a text")
    names = [config.id2label[index] for index in sorted(config.id2label)]
    data = _tokens(job, names)
    wanted = [row if isinstance(row, list) else [row] for row in data.dataset["labels"]]
    given = _likeliest(job, data.dataset["input_ids"])
    if job.subject.head == "tagger":  # of each word, by its first token
        first = [[place for place, label in enumerate(row) if label != IGNORE] for row in wanted]
        wanted, given = (
            [[row[place] for place in places] for row, places in zip(side, first, strict=True)]
            for side in (wanted, given)
        )
    return _scores(job, names, wanted, given, {"texts_cut": data.report.truncated})


def _tokens(job: Job, names: list[str]) -> TokenizedData:
    subject = job.subject
    length = subject.limit or subject.length or 2**31
    rows = [_named(row, names, number) for number, row in enumerate(job.rows, 1)]
    if subject.head == "tagger":
        data = tokenize_words(rows, subject.tokenizer, max_length=length, names=names)
    else:
        data = tokenize_texts(rows, subject.tokenizer, max_length=length, problem="single-label", names=names)
    if data.report.truncated:
        job.tell(f"{data.report.truncated} texts were cut at the {length} tokens that the model has positions for")
    for cause, count in (data.report.dropped | data.report.counted).items():
        if count:
            job.tell(f"left out: {count} {cause}")
    return data


def _likeliest(job: Job, inputs: Sequence[list[int]]) -> Classes:
    """Of each row the likeliest class, or that of each token.

    Raises:
        UserError: logits that are no numbers.
    """
    import torch

    subject, found = job.subject, [[0]] * len(inputs)
    rows, pad = [{"input_ids": ids} for ids in inputs], job.subject.tokenizer.pad_token_id
    with Meter("labels", len(rows), "text", job.tell) as meter, evaluating(subject.model), torch.no_grad():
        for places, batch in by_length(rows, pad, job.settings.batch_size, subject.model.device):
            logits = subject.model(**batch).logits  # [batch, classes], or [batch, length, classes]
            if not logits.isfinite().all():
                raise UserError(f"{subject.path}: its logits are no numbers")
            for place, best in zip(places, logits.argmax(-1).tolist(), strict=True):
                found[place] = best if isinstance(best, list) else [best]
            meter.add(len(places), int(batch["attention_mask"].sum()))
    return found


def _scores(job: Job, names: list[str], wanted: Classes, given: Classes, details: dict[str, Any]) -> list[Score]:
    count, words = len(wanted), job.subject.head == "tagger"
    flat = [[label for row in side for label in row] for side in (wanted, given)]
    right = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(wanted, given, strict=True)]
    found = []
    if "accuracy" in job.wanted:
        sizes = list(map(len, wanted))
        share = interval(np.array([right, sizes]).T, ratio) if words else share_interval(sum(right), count)
        by = details | {"majority_share": max(map(flat[0].count, set(flat[0]))) / len(flat[0])}
        found.append(Score("token accuracy" if words else "accuracy", accuracy(*flat), *share, count, details=by))
    if "macro-f1" in job.wanted:
        bounds = interval(_counts(wanted, given, len(names)), _macro)
        found.append(Score("macro F1", macro_f1(*flat), *bounds, count, details=details))
    if "span-f1" in job.wanted:
        if not words or not marks_spans(names):
            raise UserError("--metrics: span-f1 is of models whose classes mark spans, as B-PER and I-PER do")
        tags = [[[names[label] for label in row] for row in side] for side in (wanted, given)]
        pairs = [(spans(a), spans(b)) for a, b in zip(*tags, strict=True)]
        table = [(2 * len(a & b), len(a) + len(b)) for a, b in pairs]
        with np.errstate(invalid="ignore", divide="ignore"):  # a draw without a span
            bounds = interval(np.array(table), ratio)
        found.append(Score("span F1", span_f1(*tags), *bounds, count, details=details))
    return found


def _counts(wanted: Classes, given: Classes, classes: int) -> np.ndarray:
    """Of each row, class by class: how often it is right, wanted and given; shape (rows, 3 x classes)."""
    table = np.zeros((len(wanted), 3, classes))
    for row, pair in enumerate(zip(wanted, given, strict=True)):
        for a, b in zip(*pair, strict=True):
            table[row, 0, a] += a == b
            table[row, 1, a] += 1
            table[row, 2, b] += 1
    return table.reshape(len(wanted), -1)


def _macro(drawn: np.ndarray) -> np.ndarray:
    """Macro F1 of the sums of `_counts`, over the classes that occur."""
    right, wanted, given = np.moveaxis(drawn.sum(1).reshape(len(drawn), 3, -1), 1, 0)
    total = wanted + given
    return (2 * right / np.maximum(total, 1)).sum(-1) / (total > 0).sum(-1)


def _named(row: Row, names: list[str], number: int) -> Row:
    """A row with the names of its classes; a whole number is a name where one is called so, else it counts the names.

    Raises:
        UserError: the model does not know a class.
    """
    if "tags" in row:
        return row | {"tags": [_name(tag, names, number) for tag in row["tags"]]}
    return row | {"label": _name(checked_label(row["label"], "single-label"), names, number)}


def _name(label: Any, names: list[str], number: int) -> str:
    name = str(label)
    if name not in names and isinstance(label, int) and label < len(names):
        name = class_name(label, names)
    if name not in names:
        raise UserError(f"row {number}: the model has no class {name!r}; it has {', '.join(names[:10])}")
    return name


KIND = Kind(
    {"classifier": ("classification",), "tagger": ("token-classification",)},
    ("accuracy", "macro-f1"),
    measure,
)
