"""Perplexity: of documents in windows, of answers to prompts, of targets given their sources, and of masked models.

Long texts go through the model in windows of its length, each of which goes on from the one before by a stride, so that
every token is predicted once and, but for those of the first window, from at least length - stride tokens: the
procedure of "Perplexity of fixed-length models" in the library's documentation. Figures per word and per byte divide by
what lm-evaluation-harness divides by: pieces between white space, and bytes of UTF-8. As there, a document begins
behind the token that begins texts (bos, else eos), so that its first token is predicted too.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..evaluation import virtual_tokens
from ..tokens.report import IGNORE
from .kinds import Job, Kind, Row, Settings, Tell
from .losses import token_losses
from .meter import Meter, counted
from .score import Score
from .statistics import ByRow
from .subject import Subject

_BOTH = ("prompt-completion", "messages")


class Document(NamedTuple):
    """A row as the model reads it.

    Attributes:
        labels: -100 where a token is not scored; the first of a decoder's never is.
        text: of which all is scored; "" where the row is an answer.
    """

    ids: list[int]
    labels: list[int]
    text: str


def measure(job: Job) -> list[Score]:
    """Perplexity per token; of whole texts also per word and per byte.

    Raises:
        UserError: settings or texts that do not suit the model, no row left, a loss that is no number, or figures that
            are all beyond the largest number.
    """
    head = job.subject.head
    asked = (job.settings.context, job.settings.stride, job.settings.rows)
    if head != "decoder" and asked != (None, None, "single"):
        raise UserError("--context, --stride and --rows packed are for decoders, whose long texts are read in windows")
    score = {"decoder": _causal, "encoder-decoder": _targets, "masked": _masked}[head]
    documents, losses = score(job)
    table = []  # nats, tokens, words and bytes of each document
    for document, nats in zip(documents, losses, strict=True):
        words, size = len(re.split(r"\s+", document.text)), len(document.text.encode())
        table.append((nats, sum(label != IGNORE for label in document.labels), words, size))
    figures = np.array(table, dtype=np.float64)
    if bad := int((~np.isfinite(figures[:, 0])).sum()):
        raise UserError(
            f"{job.subject.path}: on {bad} of {len(figures)} rows the model's loss is no number: its weights "
            "hold none, or overflow"
        )
    found = _scores(
        figures, "pseudo-perplexity" if head == "masked" else "perplexity", bool(documents[0].text), job.tell
    )
    if not found:
        raise UserError(f"{job.subject.path}: the perplexity is beyond the largest number that there is")
    return found


def _scores(figures: np.ndarray, name: str, whole: bool, tell: Tell) -> list[Score]:
    """Of (nats, tokens, words, bytes) of each document; without those beyond the largest number, which is told."""
    nats = figures[:, 0].sum()
    found = []
    for column, unit in enumerate(("token", "word", "byte") if whole else ("token",), 1):
        units = figures[:, column].sum()
        details = {"nats": nats, f"{unit}s": int(units)}
        if unit == "byte":
            details["bits_per_byte"] = nats / units / math.log(2)
        by_row = ByRow(figures[:, [0, column]], "exp_ratio")
        if math.isinf(by_row.value):
            tell(f"{name} per {unit}: left out: exp({nats / units:.1f} nats) is beyond the largest number")
            continue
        found.append(Score.of(f"{name} per {unit}", by_row, better="lower", details=details))
    return found


# Decoders


def _causal(job: Job) -> tuple[list[Document], list[float]]:
    context, stride = window_sizes(job.subject, job.settings)
    documents = _kept(_texts(job) if job.format == "text" else _answers(job), job)
    windows, owners = [], []
    for number, document in enumerate(documents):
        for window in windows_of(document.ids, document.labels, context, stride):
            windows.append(window)
            owners.append(number)
    losses = [0.0] * len(documents)
    packs = _packs(job, windows, context)
    packed = job.settings.rows == "packed"  # then all rows of a batch have positions of their own
    rows = [_joined(windows, pack) if packed else windows[pack[0]] for pack in packs]
    lengths = [len(row["input_ids"]) for row in rows]
    for pack, found in zip(packs, _losses(job, rows, lengths, "window"), strict=True):
        ends = np.cumsum([len(windows[place]["input_ids"]) for place in pack])[:-1]
        for place, part in zip(pack, np.split(found.numpy(), ends), strict=True):
            losses[owners[place]] += float(part.sum())
    return documents, losses


def window_sizes(subject: Subject, settings: Settings) -> tuple[int, int]:
    """Tokens of a window, and those by which windows go on.

    Raises:
        UserError: sizes that make no windows, or that the model has no positions for.
    """
    context = subject.length if settings.context is None else settings.context
    if context is None:
        raise UserError(f"{subject.path}: the config does not say how long texts may be: give --context")
    if subject.limit is not None and context > subject.limit:
        raise UserError(f"--context: is {context}, and the model has positions for {subject.limit} tokens")
    stride = settings.stride or max(context // 2, 1)
    _check_window(context, stride)
    return context, stride


def check(settings: Settings) -> None:
    """Raises:
    UserError: sizes that make no windows of any model.
    """
    _check_window(settings.context, settings.stride)


def _check_window(context: int | None, stride: int | None) -> None:
    if context is None:
        return
    if context < 2:
        raise UserError(f"--context: is {context}: a window holds a token and the one that it predicts, so at least 2")
    if stride is not None and stride >= context:
        raise UserError(f"--stride: is {stride}: it must be below the {context} tokens of a window (--context)")


def windows_of(ids: list[int], labels: list[int], context: int, stride: int) -> Iterator[Row]:
    """The windows of a text that score something; a label of a window is -100 where an earlier one has it."""
    begin = done = 0
    while done < len(ids):
        end = min(begin + context, len(ids))
        own = [*[IGNORE] * (done - begin), *labels[done:end]]
        if any(label != IGNORE for label in own):
            yield {"input_ids": ids[begin:end], "labels": own}
        done, begin = end, begin + stride


def _packs(job: Job, windows: Sequence[Row], context: int) -> list[list[int]]:
    """Which windows share a row."""
    from ..tokens.packing import TrainingRows

    if job.settings.rows == "single":
        return [[place] for place in range(len(windows))]
    from ...modeling import AnyformerConfig

    if not isinstance(job.subject.model.config, AnyformerConfig) or virtual_tokens(job.subject.model):
        raise UserError("--rows packed: needs one of Anyformer's own classes without a soft prompt: leave it out")
    lengths = [len(window["input_ids"]) for window in windows]
    return TrainingRows(windows, lengths=lengths, capacity=context).packs


def _joined(windows: Sequence[Row], pack: Sequence[int]) -> Row:
    from ..tokens.packing import joined

    return joined([windows[place] for place in pack])


def _texts(job: Job) -> list[Document]:
    tokenizer = job.subject.tokenizer
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    first = [] if start is None else [start]
    texts = [row["text"] for row in job.rows]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [
        Document([*first, *ids], [*[IGNORE] * len(first), *ids] if first else [IGNORE, *ids[1:]], text)
        for text, ids in zip(texts, encoded, strict=True)
    ]


def _answers(job: Job) -> list[Document]:
    """Answers as `sft` learns them, with the token that ends them."""
    from ..tokens.supervised import tokenize_rows

    data = tokenize_rows(job.rows, job.subject.tokenizer, max_length=None)
    _tell_dropped(job, data.report.dropped)
    return [Document(row["input_ids"], [IGNORE, *row["labels"][1:]], "") for row in data.dataset]


def _kept(documents: list[Document], job: Job) -> list[Document]:
    """Those of which something is scored.

    Raises:
        UserError: nothing is.
    """
    kept = [document for document in documents if any(label != IGNORE for label in document.labels)]
    _tell_dropped(job, {"without a token to predict": len(documents) - len(kept)})
    if not kept:
        raise UserError("no row has a token to predict")
    return kept


def _tell_dropped(job: Job, dropped: dict[str, int]) -> None:
    for cause, count in dropped.items():
        if count:
            job.tell(f"perplexity: {counted(count, 'row')} left out: {cause}")


def _losses(job: Job, rows: Sequence[Row], lengths: Sequence[int], unit: str, shift: int = 1) -> Any:
    pad, size = job.subject.tokenizer.pad_token_id, job.settings.batch_size
    with Meter("perplexity", len(rows), unit, job.tell) as meter:
        model = job.subject.model
        return token_losses(model, rows, lengths, pad_token_id=pad, batch_size=size, shift=shift, meter=meter)


# Encoder-decoders


def _targets(job: Job) -> tuple[list[Document], list[float]]:
    """Targets with the token that ends them, each given its source."""
    from ..tokens.sequences import tokenize_sequences

    subject = job.subject
    limit = subject.limit or 2**31
    data = tokenize_sequences(
        job.rows,
        subject.tokenizer,
        limits=[limit, limit],
        limit_names=["the source's positions", "the target's positions"],
        start_token_id=subject.model.config.decoder_start_token_id,
    )
    _tell_dropped(job, data.report.dropped)
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in data.dataset]
    lengths = [max(len(row["input_ids"]), len(row["labels"])) for row in rows]
    losses = _losses(job, rows, lengths, "target", shift=0)
    return [Document(row["input_ids"], row["labels"], "") for row in rows], [float(loss.sum()) for loss in losses]


# Masked models


class _OneMasked(Sequence[Row]):
    """A row for each token of each document: that one hidden, and scored."""

    def __init__(self, documents: Sequence[Document], mask: int) -> None:
        self.documents, self.mask = documents, mask
        self.places = [
            (number, place)
            for number, document in enumerate(documents)
            for place, label in enumerate(document.labels)
            if label != IGNORE
        ]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        number, place = self.places[index]
        ids = self.documents[number].ids
        labels = [IGNORE] * len(ids)
        labels[place] = ids[place]
        return {"input_ids": [*ids[:place], self.mask, *ids[place + 1 :]], "labels": labels}


def _masked(job: Job) -> tuple[list[Document], list[float]]:
    """Each token from all others (Salazar et al. 2020, arXiv:1910.14659, equation 3); special tokens are not scored.

    Raises:
        UserError: a text beyond the model's positions, which no window can stand for.
    """
    subject, tokenizer = job.subject, job.subject.tokenizer
    if tokenizer.mask_token_id is None:
        raise UserError(f"{subject.path}: its tokenizer has no mask token, which pseudo-perplexity hides tokens by")
    texts = [row["text"] for row in job.rows]
    encoded = tokenizer(texts, return_special_tokens_mask=True)
    documents = []
    for number, (text, ids, special) in enumerate(
        zip(texts, encoded["input_ids"], encoded["special_tokens_mask"], strict=True), 1
    ):
        if subject.limit is not None and len(ids) > subject.limit:
            raise UserError(f"row {number} has {len(ids)} tokens, and the model has positions for {subject.limit}")
        labels = [IGNORE if added else token for token, added in zip(ids, special, strict=True)]
        documents.append(Document(ids, labels, text))
    documents = _kept(documents, job)
    rows = _OneMasked(documents, tokenizer.mask_token_id)
    lengths = [len(documents[number].ids) for number, _ in rows.places]
    losses = [0.0] * len(documents)
    for (number, _), found in zip(rows.places, _losses(job, rows, lengths, "masked token", shift=0), strict=True):
        losses[number] += float(found.sum())
    return documents, losses


KIND = Kind(
    {
        "decoder": ("text", *_BOTH),
        "encoder-decoder": ("source-target", *_BOTH),
        "masked": ("text",),
    },
    ("perplexity",),
    measure,
    check,
)
