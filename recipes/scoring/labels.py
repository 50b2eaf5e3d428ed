"""Classes of texts and of words against those of the rows: accuracy, macro F1, and F1 of spans."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..evaluation import evaluating
from ..label_metrics import accuracy, macro_f1, marks_spans, span_f1
from ..tokens.labelled import checked_label, class_name, tokenize_texts, tokenize_words
from ..tokens.padding import by_length
from ..tokens.report import IGNORE, TokenizedData
from .intervals import share_interval
from .kinds import Job, Kind, Row
from .meter import Meter
from .score import Score

if TYPE_CHECKING:
    import torch

# Of each row the classes that it has and those that the model gives: one, or one for each word.
Classes = list[list[int]]


def measure(job: Job) -> list[Score]:
    """Figures of the likeliest classes.

    Raises:
        UserError: a label that the model does not know, or span F1 of classes that mark no spans.
    """
    names, words = names_of(job), job.subject.head == "tagger"
    if words:
        rows = [row | {"tags": [name_of(tag, names, number) for tag in row["tags"]]} for number, row in numbered(job)]
        length = longest(job)
        data = told(job, tokenize_words(rows, job.subject.tokenizer, max_length=length, names=names))
    else:
        rows = [row | {"label": _class_of(row, names, number)} for number, row in numbered(job)]
        data = tokens_of(job, rows, "single-label", names)
    wanted = [row if isinstance(row, list) else [row] for row in data.dataset["labels"]]
    given: Classes = [[]] * len(wanted)
    for places, logits in logits_of(job, data.dataset["input_ids"]):
        for place, best in zip(places, logits.argmax(-1).tolist(), strict=True):
            given[place] = best if words else [best]
    if words:  # each by its first token
        first = [[place for place, label in enumerate(row) if label != IGNORE] for row in wanted]
        wanted, given = (
            [[row[place] for place in places] for row, places in zip(side, first, strict=True)]
            for side in (wanted, given)
        )
    details = {"texts_cut": data.report.truncated, "labels": sum(map(len, wanted))}
    return _scores(job, names, wanted, given, details)


# What all heads on texts have in common


def names_of(job: Job) -> list[str]:
    """Of the classes, by their number."""
    config: Any = job.subject.model.config
    return [config.id2label[index] for index in sorted(config.id2label)]


def numbered(job: Job) -> Iterator[tuple[int, Row]]:
    """The rows, from 1."""
    return enumerate(job.rows, 1)


def longest(job: Job) -> int:
    """Tokens at which a text is cut."""
    return job.subject.limit or job.subject.length or 2**31


def tokens_of(job: Job, rows: Sequence[Row], problem: str, names: Sequence[str] = ()) -> TokenizedData:
    """Texts with their labels as `tokenize_texts` makes them; what was cut or left out is told."""
    length = longest(job)
    return told(job, tokenize_texts(rows, job.subject.tokenizer, max_length=length, problem=problem, names=names))


def told(job: Job, data: TokenizedData) -> TokenizedData:
    """The same, once it is told what was cut and left out."""
    if data.report.truncated:
        job.tell(
            f"{data.report.truncated} texts were cut at the {longest(job)} tokens that the model has positions for"
        )
    for cause, count in (data.report.dropped | data.report.counted).items():
        if count:
            job.tell(f"left out: {count} {cause}")
    return data


def logits_of(job: Job, inputs: Sequence[list[int]]) -> "Iterator[tuple[list[int], torch.Tensor]]":
    """Batches of texts of like length: their places, and logits [batch, classes] or [batch, length, classes].

    Raises:
        UserError: logits that are no numbers.
    """
    import torch

    subject = job.subject
    rows, pad = [{"input_ids": ids} for ids in inputs], subject.tokenizer.pad_token_id
    with Meter("labels", len(rows), "text", job.tell) as meter, evaluating(subject.model), torch.no_grad():
        for places, batch in by_length(rows, pad, job.settings.batch_size, subject.model.device):
            logits = subject.model(**batch).logits
            if not logits.isfinite().all():
                raise UserError(f"{subject.path}: its logits are no numbers")
            yield places, logits.float()
            meter.add(len(places), int(batch["attention_mask"].sum()))


def _scores(job: Job, names: list[str], wanted: Classes, given: Classes, details: dict[str, Any]) -> list[Score]:
    count, words = len(wanted), job.subject.head == "tagger"
    found = []
    if "accuracy" in job.wanted:
        by_row, labels = accuracy(wanted, given), [label for row in wanted for label in row]
        by = details | {"majority_share": max(map(labels.count, set(labels))) / len(labels)}
        bounds = None if words else share_interval(by_row.rows[:, 0].sum(), count)
        found.append(Score.of("token accuracy" if words else "accuracy", by_row, bounds=bounds, details=by))
    if "macro-f1" in job.wanted:
        found.append(Score.of("macro F1", macro_f1(wanted, given, range(len(names))), details=details))
    if "span-f1" in job.wanted:
        if not words or not marks_spans(names):
            raise UserError("--metrics: span-f1 is of models whose classes mark spans, as B-PER and I-PER do")
        tags = ([[names[label] for label in row] for row in side] for side in (wanted, given))
        found.append(Score.of("span F1", span_f1(*tags), details=details))
    return found


def _class_of(row: Row, names: list[str], number: int) -> str:
    return name_of(checked_label(row["label"], "single-label"), names, number)


def name_of(label: Any, names: list[str], number: int) -> str:
    """The name of a class; a whole number is a name where one is called so, else it counts the names.

    Args:
        number: of the row, for messages.

    Raises:
        UserError: the model does not know it.
    """
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
