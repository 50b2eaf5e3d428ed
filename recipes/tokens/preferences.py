"""Tokens for preference tuning: a prompt with a chosen and a rejected answer, or with one answer and a label.

The ids are those that supervised fine-tuning would train on (see `supervised`): rendered by the same chat template
or taken as raw text, with one beginning token, and the answer with its end-of-turn token.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import UserError
from .report import IGNORE, TokenizationReport, TokenizedData, row_wise
from .supervised import stop_ids, tokenize_rows
from .truncation import TOO_LONG, Truncation, count_cut, first_kept

Row = dict[str, Any]
PAIR_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")

LONG_ANSWER = "with an answer longer than max_length"
NO_ANSWER = "no answer within max_length"
EQUAL = "chosen and rejected are equal"


class _Answer(NamedTuple):
    """A whole sequence, `ids[start:]` of which is the answer."""

    ids: list[int]
    start: int
    stopped: bool

    def cut(self, length: int) -> "_Answer":
        if len(self.ids) <= length:
            return self
        return _Answer(self.ids[:length], self.start, False)

    def without(self, kept: int, start: int) -> "_Answer":
        """Without the tokens from `kept` to `start`, which are the prompt's."""
        return _Answer(self.ids[:kept] + self.ids[start:], self.start - (start - kept), self.stopped)


def _finish(report: TokenizationReport, *, max_length: int, truncation: Truncation = "drop") -> None:
    """Raises:
    UserError: no row is left.
    """
    if not report.rows_kept:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.dropped.items()))
        raise UserError(
            f"None of the {report.rows} rows is left: {causes}. train.max_length is {max_length} and data.truncation "
            f"is {truncation}; the longest sequence has {report.longest} tokens. Raise train.max_length."
        )


@row_wise(_finish, margin=0.0)
def tokenize_pairs(
    rows: Sequence[Row], tokenizer: Any, *, max_length: int, truncation: Truncation = "drop"
) -> TokenizedData:
    """Tokenise rows of `prompt`, `chosen` and `rejected`.

    Args:
        max_length: longest sequence in tokens, of prompt and one answer.
        truncation: what happens to a pair with a longer side: left out, or that side is cut at its end
            ("keep_start"), or the prompt of both at its beginning, so that the longer fits ("keep_end").

    Returns:
        A data set of `prompt_ids`, `chosen_ids`, `rejected_ids`, `length` (of the longer side) and, where the rows
        have one, `margin`. In the report a row is a pair, its tokens are those of both sides, and supervised are the
        two answers.

    Raises:
        UserError: rows that cannot be rendered, or none left.
    """
    rows = [_one_answer(row, number) for number, row in enumerate(rows, 1)]
    sides = [_tokenized([_asked(row, row[side]) for row in rows], tokenizer) for side in _SIDES]
    report = _report_of(rows, [side.report for side in sides])
    dropped: Counter[str] = Counter()
    names = (*PAIR_COLUMNS, "length", *(("margin",) if any("margin" in row for row in rows) else ()))
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for row, *whole in zip(rows, *(side.answers for side in sides), strict=True):
        answers, cause = _fitted(whole, max_length, truncation, tokenizer.bos_token_id)
        start = _shared(answers)
        chosen, rejected = (answer.ids[start:] for answer in answers)
        cause = cause or (EQUAL if chosen == rejected else "")
        if cause:
            dropped[cause] += 1
            continue
        values = [
            answers[0].ids[:start],
            chosen,
            rejected,
            start + max(len(chosen), len(rejected)),
            row.get("margin", 0.0),
        ]
        for name, value in zip(names, values, strict=False):
            columns[name].append(value)
        _count(report, answers, whole, start, truncation)
        report.merged += any(answer.start > start for answer in answers)
    return _finished(columns, report, dropped)


@row_wise(_finish)
def tokenize_labelled(
    rows: Sequence[Row], tokenizer: Any, *, max_length: int, truncation: Truncation = "drop"
) -> TokenizedData:
    """Tokenise rows of `prompt`, `completion` and `label`.

    Returns:
        A data set of `prompt_ids`, `completion_ids`, `label` (bool) and `length`.

    Raises:
        UserError: rows that cannot be rendered, or none left.
    """
    tokenized = _tokenized([_asked(row, row["completion"]) for row in rows], tokenizer)
    report = _report_of(rows, [tokenized.report])
    report.merged = tokenized.report.merged
    dropped: Counter[str] = Counter()
    columns: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "completion_ids", "label", "length")}
    for row, whole in zip(rows, tokenized.answers, strict=True):
        (answer,), cause = _fitted([whole], max_length, truncation, tokenizer.bos_token_id)
        if cause:
            dropped[cause] += 1
            continue
        ids, start = answer.ids, answer.start
        for name, value in zip(columns, (ids[:start], ids[start:], bool(row["label"]), len(ids)), strict=True):
            columns[name].append(value)
        _count(report, [answer], [whole], start, truncation)
    return _finished(columns, report, dropped)


_SIDES = ("chosen", "rejected")


class _Tokenized(NamedTuple):
    answers: list[_Answer]
    report: TokenizationReport


def _asked(row: Row, answer: Any) -> Row:
    """A prompt, the tools that it offers, and one answer."""
    return {name: row[name] for name in ("prompt", "tools") if name in row} | {"completion": answer}


def _one_answer(row: Row, number: int) -> Row:
    """The row with turns that both sides share moved into the prompt; each side must then be one answer.

    Raises:
        UserError: a side is a conversation of its own.
    """
    if not isinstance(row["prompt"], list):
        return row
    chosen, rejected = row["chosen"], row["rejected"]
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    row = row | {"prompt": row["prompt"] + chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    for side in _SIDES:
        if len(row[side]) != 1:
            raise UserError(
                f"Row {number}: {side} holds {len(row[side])} messages after what both sides share: a preference is "
                "between two answers to one prompt. Put the earlier turns into prompt."
            )
    return row


def _tokenized(rows: Sequence[Row], tokenizer: Any) -> _Tokenized:
    """Each row's ids, cut behind the answer's end token, and the place where the answer begins."""
    dataset, report = tokenize_rows(rows, tokenizer, max_length=None)
    if report.dropped:
        raise UserError(
            f"{sum(report.dropped.values())} rows have an answer without a single token of its own: {report.dropped}"
        )
    ends = set(stop_ids(tokenizer))
    answers = []
    for row in dataset:
        on = [index for index, label in enumerate(row["labels"]) if label != IGNORE]
        ids = row["input_ids"][: on[-1] + 1]
        answers.append(_Answer(ids, on[0], ids[-1] in ends))
    return _Tokenized(answers, report)


def _fitted(
    whole: list[_Answer], max_length: int, truncation: Truncation, bos: int | None
) -> tuple[list[_Answer], str]:
    """The answers within the limit, and why they cannot be used, or nothing."""
    beyond = max(len(answer.ids) for answer in whole) - max_length
    if beyond > 0 and truncation == "keep_end":
        # Of both sides the same, so that they are answers to one prompt; one token of it must be left.
        shared, kept = _shared(whole), first_kept(whole[0].ids, bos)
        if beyond + max(kept, 1) > shared:
            return whole, LONG_ANSWER
        return [answer.without(kept, kept + beyond) for answer in whole], ""
    if beyond > 0 and truncation != "keep_start":
        return whole, TOO_LONG
    answers = [answer.cut(max_length) for answer in whole]
    # Nothing predicts the first token of a sequence.
    return answers, NO_ANSWER if any(len(answer.ids) <= max(answer.start, 1) for answer in answers) else ""


def _count(
    report: TokenizationReport, answers: list[_Answer], whole: list[_Answer], start: int, truncation: Truncation
) -> None:
    report.tokens += sum(len(answer.ids) for answer in answers)
    report.supervised_tokens += sum(len(answer.ids) - max(start, 1) for answer in answers)
    if answers != whole:
        count_cut(report, truncation)
    report.stopped += all(answer.stopped for answer in answers)


def _shared(answers: list[_Answer]) -> int:
    """Where the sides part: after the prompt, or before it where a token spans its end and differs."""
    limit = min(min(answer.start, len(answer.ids)) for answer in answers)
    first, *others = (answer.ids[:limit] for answer in answers)
    return next((i for i in range(limit) if any(other[i] != first[i] for other in others)), limit)


def _report_of(rows: Sequence[Row], sides: list[TokenizationReport]) -> TokenizationReport:
    warnings = list(dict.fromkeys(warning for side in sides for warning in side.warnings))
    return TokenizationReport(rows=len(rows), longest=max(side.longest for side in sides), warnings=warnings)


def _finished(columns: dict[str, list[Any]], report: TokenizationReport, dropped: Counter[str]) -> TokenizedData:
    from datasets import Dataset

    report.rows_kept, report.dropped = len(columns["prompt_ids"]), dict(dropped)
    return TokenizedData(Dataset.from_dict(columns), report)
