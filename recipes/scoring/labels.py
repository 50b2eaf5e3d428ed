"""Classes of texts against those of the rows: accuracy and macro F1."""

from typing import Any

import numpy as np

from ..errors import UserError
from ..evaluation import evaluating
from ..label_metrics import accuracy, macro_f1
from ..tokens.labelled import checked_label, class_name, tokenize_texts
from ..tokens.padding import by_length
from .intervals import interval, share_interval
from .kinds import Job, Kind, Row
from .meter import Meter
from .score import Score


def measure(job: Job) -> list[Score]:
    """Figures of the likeliest class of each text.

    Raises:
        UserError: a head that gives no single class, or a label that it does not know.
    """
    import torch

    subject = job.subject
    config: Any = subject.model.config
    problem = config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification")
    if problem != "single_label_classification":
        raise UserError(f"{subject.path}: is made for {problem}: accuracy and macro F1 are of one class a text")
    names = [config.id2label[index] for index in sorted(config.id2label)]
    rows = [_named(row, names, number) for number, row in enumerate(job.rows, 1)]
    length = subject.limit or subject.length or 2**31
    data = tokenize_texts(rows, subject.tokenizer, max_length=length, problem="single-label", names=names)
    if data.report.truncated:
        job.tell(f"{data.report.truncated} texts were cut at the {length} tokens that the model has positions for")
    for cause, count in data.report.dropped.items():
        job.tell(f"{count} rows left out: {cause}")
    wanted = list(data.dataset["labels"])
    inputs, given = [{"input_ids": ids} for ids in data.dataset["input_ids"]], [0] * len(wanted)
    pad = subject.tokenizer.pad_token_id
    with Meter("labels", len(inputs), "texts", job.tell) as meter, evaluating(subject.model), torch.no_grad():
        for places, batch in by_length(inputs, pad, job.settings.batch_size, subject.model.device):
            logits = subject.model(**batch).logits.float()  # [batch, classes]
            if not logits.isfinite().all():
                raise UserError(f"{subject.path}: its logits are no numbers")
            for place, best in zip(places, logits.argmax(-1).tolist(), strict=True):
                given[place] = best
            meter.add(len(places), int(batch["attention_mask"].sum()))
    return _scores(job, wanted, given, {"texts_cut": data.report.truncated})


def _scores(job: Job, wanted: list[int], given: list[int], details: dict[str, Any]) -> list[Score]:
    count, found = len(wanted), []
    if "accuracy" in job.wanted:
        hits = sum(a == b for a, b in zip(wanted, given, strict=True))
        share = share_interval(hits, count)
        majority = max(map(wanted.count, set(wanted))) / count
        by = details | {"majority_share": majority}
        found.append(Score("accuracy", accuracy(wanted, given), *share, count, details=by))
    if "macro-f1" in job.wanted:
        pairs = np.array([wanted, given]).T

        def statistic(drawn: np.ndarray) -> np.ndarray:
            return np.array([macro_f1(*rows.T.astype(int).tolist()) for rows in drawn])

        found.append(Score("macro F1", macro_f1(wanted, given), *interval(pairs, statistic), count, details=details))
    return found


def _named(row: Row, names: list[str], number: int) -> Row:
    """A row with the name of its class; a whole number is a name where one is called so, else it counts the names.

    Raises:
        UserError: the model does not know the class.
    """
    label = checked_label(row["label"], "single-label")
    name = str(label)
    if name not in names and isinstance(label, int) and label < len(names):
        name = class_name(label, names)
    if name not in names:
        known = ", ".join(names[:10])
        raise UserError(f"row {number}: the model has no class {name!r}; it has {known}")
    return row | {"label": name}


KIND = Kind({"classifier": ("classification",)}, ("accuracy", "macro-f1"), measure)
