"""Tokens for an encoder-decoder: a source that the encoder reads, and the target that the decoder writes.

Source and target are a row's own (`source`, `target`); its prompt and completion; or a conversation up to its last
answer, and that answer. Earlier answers are read, not learned.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ..errors import UserError
from .batches import batches
from .report import TokenizationReport, TokenizedData, row_wise

Row = dict[str, Any]


def _finish(report: TokenizationReport, **settings: Any) -> None:
    """Raises:
    UserError: no row is left.
    """
    if not report.rows_kept:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.dropped.items()))
        raise UserError(f"None of the {report.rows} rows is left to train on: {causes or 'there are none'}")


@row_wise(_finish)
def tokenize_sequences(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    limits: Sequence[int],
    limit_names: Sequence[str],
    start_token_id: int | None,
    truncation: Literal["drop", "keep_start"] = "drop",
) -> TokenizedData:
    """Tokenise sources and targets.

    Args:
        limits: the longest source and the longest target, in tokens.
        limit_names: what these are called in a recipe.
        start_token_id: with which the decoder starts, see `encode_targets`.
        truncation: what happens to a longer row: left out, or cut at its end.

    Returns:
        A data set of `input_ids` and `labels`. Of the report, `tokens` are those of both sides.

    Raises:
        UserError: rows that cannot be rendered, or none left.
    """
    from datasets import Dataset

    report = TokenizationReport()
    sources: list[list[int]] = []
    targets: list[list[int]] = []
    for batch in batches(rows):
        report.rows += len(batch)
        written = encode_targets([target_text(row) for row in batch], tokenizer, start_token_id)
        for row, source, target in zip(batch, encode_sources(batch, tokenizer), written, strict=True):
            report.longest = max(report.longest, len(source), len(target))
            long = [len(ids) > limit for ids, limit in zip((source, target), limits, strict=True)]
            cause = _unusable(row) or ("" if source else "without a token in the source")
            if not cause and any(long) and truncation == "drop":
                cause = f"longer than {limit_names[long.index(True)]} ({limits[long.index(True)]})"
            if cause:
                report.dropped[cause] = report.dropped.get(cause, 0) + 1
                continue
            if long[0]:  # the tokenizer cuts, so that what it writes at the end stays there
                source = encode_sources([row], tokenizer, truncation=True, max_length=limits[0])[0]
            report.truncated += any(long)
            report.stopped += not long[1]
            sources.append(source)
            targets.append(target[: limits[1]])  # a cut target does not end, and is not taught to
    report.rows_kept = len(sources)
    report.supervised_tokens = sum(map(len, targets))
    report.tokens = sum(map(len, sources)) + report.supervised_tokens
    return TokenizedData(Dataset.from_dict({"input_ids": sources, "labels": targets}), report)


def encode_sources(rows: Sequence[Row], tokenizer: Any, **options: Any) -> list[list[int]]:
    """The tokens of each row's source; `options` are the tokenizer's, for cutting."""
    found: list[list[int]] = [[]] * len(rows)
    # A chat template has written the special tokens already.
    rendered = [bool(_turns(row)) and bool(tokenizer.chat_template) for row in rows]
    for kind in set(rendered):
        places = [place for place, value in enumerate(rendered) if value == kind]
        texts = [_source_text(rows[place], tokenizer) for place in places]
        encoded = tokenizer(texts, add_special_tokens=not kind, **options)["input_ids"]
        for place, ids in zip(places, encoded, strict=True):
            found[place] = ids
    return found


def encode_targets(texts: Sequence[str], tokenizer: Any, start_token_id: int | None) -> list[list[int]]:
    """Labels: what the tokenizer makes of a target, without the start token that the model puts there itself, and
    with the end token."""
    end = tokenizer.eos_token_id
    found = []
    for ids in tokenizer(text_target=list(texts))["input_ids"]:
        body = ids[1:] if ids[:1] == [start_token_id] and start_token_id != end else ids
        found.append(body if body[-1:] == [end] else [*body, end])
    return found


def target_text(row: Row) -> str:
    """The text that the decoder has to write."""
    turns = _turns(row)
    return turns[-1]["content"] if turns else row["completion"] if "completion" in row else row["target"]


def asked_text(row: Row) -> str:
    """The source as a person reads it."""
    turns = _turns(row)
    return turns[-2:][0]["content"] if turns else _plain_source(row)


def _source_text(row: Row, tokenizer: Any) -> str:
    turns = _turns(row)
    if not turns:
        return _plain_source(row)
    before = [{name: value for name, value in turn.items() if name != "train"} for turn in turns[:-1]]
    if before and tokenizer.chat_template:
        return tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
    if len(before) > 1:
        raise UserError(
            "data: the rows are conversations of several turns, but the tokenizer has no chat template: use one "
            "that has, or give prompt and completion as plain text"
        )
    return before[0]["content"] if before else ""


def _plain_source(row: Row) -> str:
    return row["prompt"] if "prompt" in row else row["source"]


def _unusable(row: Row) -> str:
    """Why a row is left out whatever its length, or nothing."""
    turns = _turns(row)
    if turns and turns[-1].get("train") is False:
        return "whose last answer is not trained on"
    return "without a message before the answer" if len(turns) == 1 else ""


def _turns(row: Row) -> list[dict[str, Any]]:
    """The messages of a row, the answer last; none where it is plain text."""
    if "messages" in row:
        return row["messages"]
    return [*row["prompt"], *row["completion"]] if isinstance(row.get("prompt"), list) else []
