"""Prompts that a model goes on with by itself, and what it wrote."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import UserError
from .batches import batches
from .report import IGNORE, TokenizationReport, TokenizedData

NO_ROOM = "prompts longer than max_length"
# Prompts that are answered at once.
_AT_ONCE = 32


def tokenize_prompts(
    rows: Iterable[dict[str, Any]], tokenizer: Any, *, max_length: int, max_new_tokens: int, prompts_per_text: int
) -> TokenizedData:
    """Prompts as `input_ids`: messages through the chat template, plain prompts as they stand, of texts pieces.

    Args:
        max_length: of a prompt in tokens; a longer one is left out. A shorter text is one prompt.
        max_new_tokens: that the model will write to each, for the report: it counts them as learned.
        prompts_per_text: so many pieces of `max_length` tokens are taken of a text, evenly spread.

    Raises:
        UserError: a prompt that the chat template refuses, or none left.
    """
    report = TokenizationReport()
    prompts: list[list[int]] = []
    for batch in batches(rows):
        for row, ids in zip(batch, _encoded(batch, tokenizer, report.rows), strict=True):
            report.rows += 1
            report.longest = max(report.longest, len(ids))
            if "text" in row:
                prompts += pieces_of(ids, max_length, prompts_per_text)
            elif len(ids) <= max_length:
                prompts.append(ids)
            else:
                report.dropped[NO_ROOM] = report.dropped.get(NO_ROOM, 0) + 1
    if not prompts:
        raise UserError(
            f"None of the {report.rows} prompts has at most objective.max_length={max_length} tokens; the longest has "
            f"{report.longest}. Raise objective.max_length"
        )
    report.rows_kept = report.stopped = len(prompts)
    report.supervised_tokens = len(prompts) * max_new_tokens
    report.tokens = sum(map(len, prompts)) + report.supervised_tokens
    return TokenizedData(_dataset({"input_ids": prompts}), report)


def _encoded(rows: Sequence[dict[str, Any]], tokenizer: Any, before: int) -> list[list[int]]:
    """The tokens of each row's text or prompt, without an end."""
    import jinja2

    found = []
    for number, row in enumerate(rows, before + 1):
        prompt = row["text"] if "text" in row else row["prompt"]
        try:
            found.append(encode_prompt(prompt, tokenizer))
        except jinja2.TemplateError as error:
            raise UserError(f"Row {number}: the chat template refuses the prompt: {error}") from error
    return found


def pieces_of(ids: list[int], length: int, count: int) -> list[list[int]]:
    """At most `count` pieces of `length` tokens, evenly spread over a text, which do not overlap."""
    count = min(count, max(len(ids) // length, 1))
    room = max(len(ids) - count * length, 0)
    starts = [index * length + (2 * index + 1) * room // (2 * count) for index in range(count)]
    return [ids[start : start + length] for start in starts]


def encode_prompt(prompt: Any, tokenizer: Any) -> list[int]:
    """The tokens that a model goes on from: of rendered messages, or of plain text."""
    chat = not isinstance(prompt, str)
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) if chat else prompt
    return tokenizer(text, add_special_tokens=not chat)["input_ids"]  # a template has written the special tokens


def answers_of(base: Any) -> Callable[..., TokenizedData]:
    """A function that makes rows to learn from of prompts, as `Tokenizing` takes it: a model's own answers to them.

    Args:
        base: the model; what it is, the settings must tell, as the answers depend on it.
    """

    def write(rows: Iterable[dict[str, Any]], tokenizer: Any, *, max_new_tokens: int, **model: Any) -> TokenizedData:
        from ..evaluation import greedy_answers

        prompts = sorted((list(row["input_ids"]) for row in rows), key=len)
        limits = {"max_new_tokens": max_new_tokens, "batch_size": _AT_ONCE}
        return _answered(prompts, greedy_answers(base, tokenizer, prompts, **limits))

    return write


def _answered(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> TokenizedData:
    """Rows of `input_ids` and `labels`: prompts with the answers to them, which are learned."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    labels = [[*[IGNORE] * len(prompt), *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    report = TokenizationReport(rows=len(rows), rows_kept=len(rows), tokens=sum(map(len, rows)))
    report.supervised_tokens = sum(map(len, answers))
    return TokenizedData(_dataset({"input_ids": rows, "labels": labels}), report)


def _dataset(columns: dict[str, list[list[int]]]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(columns)
