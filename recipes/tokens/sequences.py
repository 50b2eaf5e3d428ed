"""Tokens for an encoder-decoder: a source that the encoder reads, and the target that the decoder writes.

Source and target are a row's own (`source`, `target`); its prompt and completion; or a conversation up to its last
answer, and that answer. Earlier answers are read, not learned.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UserError
from .batches import batches
from .chat_template import answer_text, prompt_text
from .report import TokenizationReport, TokenizedData, row_wise
from .truncation import Truncation, count_cut, cut

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
    truncation: Truncation = "drop",
) -> TokenizedData:
    """Tokenise sources and targets.

    Args:
        limits: the longest source and the longest target, in tokens.
        limit_names: what these are called in a recipe.
        start_token_id: with which the decoder starts, see `encode_targets`.
        truncation: what happens to a longer row: left out; source and target cut at their end ("keep_start"); or the
            source cut at its beginning, and a row with a longer target left out ("keep_end").

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
            # Without its beginning, a target would teach the decoder to start in the middle.
            too_long = long if truncation == "drop" else [False, long[1] and truncation == "keep_end"]
            if not cause and any(too_long):
                cause = f"longer than {limit_names[too_long.index(True)]} ({limits[too_long.index(True)]})"
            if cause:
                report.dropped[cause] = report.dropped.get(cause, 0) + 1
                continue
            if long[0]:
                source = encode_sources([row], tokenizer, limits[0], truncation)[0]
            if any(long):
                count_cut(report, truncation)
            report.stopped += not long[1]
            sources.append(source)
            targets.append(target[: limits[1]])  # a cut target does not end, and is not taught to
    report.rows_kept = len(sources)
    report.supervised_tokens = sum(map(len, targets))
    report.tokens = sum(map(len, sources)) + report.supervised_tokens
    return TokenizedData(Dataset.from_dict({"input_ids": sources, "labels": targets}), report)


def encode_sources(
    rows: Sequence[Row], tokenizer: Any, limit: int | None = None, truncation: Truncation = "keep_start"
) -> list[list[int]]:
    """The tokens of each row's source, cut to a limit."""
    found: list[list[int]] = [[]] * len(rows)
    # A chat template has written the special tokens already.
    rendered = [bool(_turns(row)) and bool(tokenizer.chat_template) for row in rows]
    for kind in set(rendered):
        places = [place for place, value in enumerate(rendered) if value == kind]
        texts = [_source_text(rows[place], tokenizer) for place in places]
        if limit is None:
            encoded = tokenizer(texts, add_special_tokens=not kind)["input_ids"]
        else:
            encoded = cut(tokenizer, texts, limit, truncation, add_special_tokens=not kind)["input_ids"]
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
    return answer_text(turns[-2:][0]) if turns else _plain_source(row)


def _source_text(row: Row, tokenizer: Any) -> str:
    turns = _turns(row)
    if not turns:
        return _plain_source(row)
    before = turns[:-1]
    if before and tokenizer.chat_template:
        return prompt_text(tokenizer, before, row.get("tools"))
    if row.get("tools") or any("tool_calls" in turn for turn in turns):
        raise UserError("data: the rows have tools, but the tokenizer has no chat template that could write them")
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
    if turns and turns[-1].get("tool_calls"):
        raise UserError(
            "data: a row ends with a tool call, and how an encoder-decoder writes one no template says: leave it "
            "out, or write the call into the message's content"
        )
    if turns and turns[-1].get("train") is False:
        return "whose last answer is not trained on"
    return "without a message before the answer" if len(turns) == 1 else ""


def _turns(row: Row) -> list[dict[str, Any]]:
    """The messages of a row, the answer last; none where it is plain text."""
    if "messages" in row:
        return row["messages"]
    return [*row["prompt"], *row["completion"]] if isinstance(row.get("prompt"), list) else []
