"""Sets of labels of texts against those of the rows: micro and macro F1, and how often the whole set is right."""

from ..errors import UserError
from ..label_metrics import exact_match, macro_f1, micro_f1
from .intervals import share_interval
from .kinds import Job, Kind, Row
from .labels import logits_of, name_of, names_of, numbered, tokens_of
from .score import Score


def measure(job: Job) -> list[Score]:
    """Figures of the labels whose logits are above 0, as they are trained.

    Raises:
        UserError: a row whose label is no list, or a label that the model does not know.
    """
    names = names_of(job)
    data = tokens_of(job, [_named(row, names, number) for number, row in numbered(job)], "multi-label", names)
    wanted = [[place for place, on in enumerate(row) if on] for row in data.dataset["labels"]]
    given: list[list[int]] = [[]] * len(wanted)
    for places, logits in logits_of(job, data.dataset["input_ids"]):
        for place, row in zip(places, logits > 0, strict=True):
            given[place] = row.nonzero()[:, 0].tolist()
    details, found = {"texts_cut": data.report.truncated}, []
    if "accuracy" in job.wanted:
        by_row = exact_match(wanted, given)
        bounds = share_interval(by_row.rows[:, 0].sum(), len(wanted))
        found.append(Score.of("accuracy of whole sets", by_row, bounds=bounds, details=details))
    if "micro-f1" in job.wanted:
        found.append(Score.of("micro F1", micro_f1(wanted, given), details=details))
    if "macro-f1" in job.wanted:
        found.append(Score.of("macro F1", macro_f1(wanted, given, range(len(names)), sets=True), details=details))
    return found


def _named(row: Row, names: list[str], number: int) -> Row:
    labels = row["label"]
    if not isinstance(labels, list):
        raise UserError(f"row {number}: the model gives sets of labels, so its label must be a list, not {labels!r}")
    return row | {"label": [name_of(label, names, number) for label in labels]}


KIND = Kind({"multi-labeller": ("classification",)}, ("accuracy", "micro-f1", "macro-f1"), measure)
