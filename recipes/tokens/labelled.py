"""Tokens and targets of labelled text: a class, several labels or a value for a text, and a tag for each word."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UserError
from .batches import batches
from .report import IGNORE, TokenizationReport, TokenizedData, row_wise
from .truncation import TOO_LONG, Truncation, cut

Row = dict[str, Any]
Label = str | int | float | list[str]


def _finish(report: TokenizationReport, *, max_length: int, **settings: Any) -> None:
    """Raises:
    UserError: no row is left.
    """
    if not report.rows_kept:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.dropped.items()))
        raise UserError(f"None of the {report.rows} rows is left: {causes}. objective.max_length is {max_length}")
    for why, count in report.counted.items():
        if count:
            report.warnings.append(f"{count:,} {why}: they are neither trained on nor measured")


@row_wise(_finish)
def tokenize_texts(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    max_length: int,
    problem: str,
    names: Sequence[str] = (),
    numbered: Sequence[str] | None = None,
    truncation: Truncation = "keep_start",
) -> TokenizedData:
    """Tokenise rows of `text` and `label`.

    Args:
        max_length: longest text in tokens.
        problem: single-label, multi-label or regression.
        names: of the classes, by their number.
        numbered: what a label that is a whole number counts, see `class_name`.
        truncation: what happens to a longer text, see `cut`; "drop" leaves it out.

    Returns:
        A data set of `input_ids` and `labels`: a class, a list of 0 and 1, or a value.

    Raises:
        UserError: a label of another kind, or no row left.
    """
    numbers = {name: index for index, name in enumerate(names)}
    report = TokenizationReport()
    ids: list[list[int]] = []
    labels: list[Any] = []
    for batch in batches(rows):
        report.rows += len(batch)
        encoded = tokenizer([row["text"] for row in batch])["input_ids"]
        for row, whole in zip(batch, encoded, strict=True):
            report.longest = max(report.longest, len(whole))
            long = len(whole) > max_length
            if not whole or (long and truncation == "drop"):
                cause = TOO_LONG if whole else "without a token"
                report.dropped[cause] = report.dropped.get(cause, 0) + 1
                continue
            if long:
                report.truncated += 1
                whole = cut(tokenizer, [row["text"]], max_length, truncation)["input_ids"][0]
            ids.append(whole)
            labels.append(target_of(row["label"], problem, numbers, numbered))
    report.rows_kept = report.stopped = report.supervised_tokens = len(ids)  # a label a row
    report.tokens = sum(map(len, ids))
    return _labelled(ids, labels, report)


@row_wise(_finish)
def tokenize_words(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    max_length: int,
    names: Sequence[str],
    numbered: Sequence[str] | None = None,
    truncation: Truncation = "keep_start",
) -> TokenizedData:
    """Tokenise rows of `tokens` and `tags`.

    Args: as of `tokenize_texts`.

    Returns:
        A data set of `input_ids` and `labels`: at the first token of each word the class of its tag, -100 elsewhere.

    Raises:
        UserError: a tag beyond the names, or no row left.
    """
    numbers = {name: index for index, name in enumerate(names)}
    report = TokenizationReport()
    ids: list[list[int]] = []
    labels: list[list[int]] = []
    beyond = silent = 0
    for batch in batches(rows):
        report.rows += len(batch)
        encoded = encode_words([row["tokens"] for row in batch], tokenizer)
        for index, row in enumerate(batch):
            words = encoded.word_ids(index)
            report.longest = max(report.longest, len(words))
            kept, place = encoded, index
            silent += len(row["tokens"]) - len(set(words) - {None})
            own = words
            if len(words) > max_length and truncation == "drop":
                report.dropped[TOO_LONG] = report.dropped.get(TOO_LONG, 0) + 1
                continue
            if len(words) > max_length:
                kept, place = cut(tokenizer, [row["tokens"]], max_length, truncation, is_split_into_words=True), 0
                own = kept.word_ids(0)
                if truncation == "keep_end":
                    own = _whole_words(words, own)
                beyond += len(set(words) - set(own) - {None})
                report.truncated += 1
            targets = [IGNORE] * len(own)
            for at, word in beginnings(own):
                targets[at] = numbers[class_name(row["tags"][word], numbered)]
            if all(target == IGNORE for target in targets):
                report.dropped["without a token"] = report.dropped.get("without a token", 0) + 1
                continue
            ids.append(kept["input_ids"][place])
            labels.append(targets)
    report.rows_kept = report.stopped = len(ids)
    report.tokens = sum(map(len, ids))
    report.supervised_tokens = sum(target != IGNORE for row in labels for target in row)
    for count, why in ((beyond, f"lie beyond {max_length} tokens"), (silent, "have no token")):
        report.counted[f"words {why}"] = count
    return _labelled(ids, labels, report)


def _labelled(ids: list[list[int]], labels: list[Any], report: TokenizationReport) -> TokenizedData:
    from datasets import Dataset

    return TokenizedData(Dataset.from_dict({"input_ids": ids, "labels": labels}), report)


# Labels


def class_name(label: str | int, numbered: Sequence[str] | None) -> str:
    """The name of a class as a row gives it; a number counts the names in `numbered`, if there are any.

    Raises:
        UserError: a number beyond the names.
    """
    if isinstance(label, str) or not numbered:
        return str(label)
    if label >= len(numbered):
        raise UserError(
            f"objective.labels: the data have the class {label}, but only {len(numbered)} names are given, for the "
            f"classes 0 to {len(numbered) - 1}"
        )
    return numbered[label]


def target_of(label: Label, problem: str, numbers: dict[str, int], numbered: Sequence[str] | None) -> Any:
    """What a label is trained as."""
    if problem == "single-label":
        return numbers[class_name(label, numbered)]  # type: ignore[arg-type]
    if isinstance(label, list):
        return [float(name in label) for name in numbers]
    return checked_label(label, "regression")


def checked_label(label: Label, problem: str) -> Label:
    """The label as the problem has it.

    Raises:
        UserError: it is of another kind.
    """
    if problem == "single-label":
        if isinstance(label, list):
            raise UserError("objective.problem: the label of a row is a list: set it to multi-label")
        if not isinstance(label, str) and (label < 0 or isinstance(label, float)):
            raise UserError(
                f"objective.problem: the label {label:g} is no class, which is text or a whole number from 0: set it "
                "to regression if it is a value to predict"
            )
    elif problem == "multi-label" and not isinstance(label, list):
        raise UserError("objective.problem: multi-label takes rows whose label is a list, found one that is none")
    elif problem == "regression":
        try:  # text in a CSV file
            value = _number(label)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise UserError("objective.problem: regression takes rows whose label is a number, found one that is none")
        return value
    return label


def _number(label: Label) -> float:
    # Python alone takes `1_000` and digits of other scripts for numbers.
    if isinstance(label, str) and not re.fullmatch(r"\s*[+-]?[0-9.]+([eE][+-]?[0-9]+)?\s*", label):
        raise ValueError("no number")
    return float(label)  # type: ignore[arg-type]


# Words


def encode_words(words: Sequence[Sequence[str]], tokenizer: Any, **options: Any) -> Any:
    """The tokens of texts that are taken apart into words."""
    return tokenizer(words, is_split_into_words=True, **options)


def beginnings(words: Sequence[int | None]) -> list[tuple[int, int]]:
    """(place, word) of the first token of each word, from the number of the word that each token belongs to."""
    before = (None, *words[:-1])
    return [(i, word) for i, word in enumerate(words) if word is not None and word != before[i]]


def _whole_words(words: Sequence[int | None], kept: Sequence[int | None]) -> list[int | None]:
    """The words of the kept tokens of a row, without one whose first token was cut off."""
    first = next((word for word in kept if word is not None), None)
    lost = kept.count(first) < words.count(first)
    return [None if lost and word == first else word for word in kept]
