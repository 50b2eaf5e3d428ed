"""Tokens and labels for supervised fine-tuning.

Rows become `input_ids` and `labels`, with -100 on every token that is not trained on. TRL's SFTTrainer
takes a data set that has both columns as it is: its collator pads `labels` with -100 by row length, so a
pad token that equals the end-of-sequence token costs no real one its label.

What is supervised of a conversation is found without `{% generation %}` markers in the chat template: the
template is rendered a second time with placeholders for the answers, and the answers' places are read off.
"""

import json
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from ..errors import UserError
from .alignment import Span
from .chat_template import ChatTemplate
from .report import IGNORE, TokenizationReport, TokenizedData, row_wise
from .truncation import TOO_LONG, Truncation, count_cut, pieces

_BATCH = 512

LossOn = Literal["completion", "assistant", "all"] | Sequence[str]


class _Encodable(NamedTuple):
    """Text to encode and the character spans of it to train on."""

    text: str
    spans: list[Span] | None  # None: every token
    chat: bool  # a template has already written the special tokens


def _finish(report: TokenizationReport, *, max_length: int | None, truncation: str = "drop", **others: Any) -> None:
    """Raises:
    UserError: no row is left.
    """
    if not report.rows_kept:
        raise UserError(_nothing_left(report, max_length, truncation))


@row_wise(_finish)
def tokenize_rows(
    rows: Iterable[dict[str, Any]],
    tokenizer: Any,
    *,
    max_length: int | None,
    loss_on: LossOn = "completion",
    truncation: Truncation = "drop",
) -> TokenizedData:
    """Tokenise rows of `load_splits` and label what is to be trained on.

    Supervised are, in conversations: the assistant's messages (of prompt and completion: the completion's),
    each with the end-of-turn token that the template writes; in plain prompt and completion: the completion
    and the end-of-sequence token; in text: everything and the end-of-sequence token. A message with
    `"train": false` never is.

    Args:
        loss_on: "completion": as above; "assistant": also the assistant's messages in a prompt; "all": every token;
            a list of roles: the messages of these, with the end-of-turn token where the template writes one.
        max_length: longest row in tokens, or None for no limit.
        truncation: what happens to a longer row, see `truncation.pieces`; pieces without a supervised token are left
            out.

    Raises:
        UserError: no fast tokenizer, no or an ambiguous chat template, no end token, or no rows left.
    """
    encoder = _Encoder(tokenizer)
    template: ChatTemplate | None = None
    report = TokenizationReport()
    ids, labels, ends = array("i"), array("i"), [0]
    stops = set(stop_ids(tokenizer))
    dropped: Counter[str] = Counter()
    for batch in _batches(rows, _BATCH):
        items = []
        for row in batch:
            report.rows += 1
            if template is None and _is_chat(row):
                template = ChatTemplate(tokenizer)
                template.require_end_token()
            items.append(_encodable(row, template, report.rows, loss_on))
        for item, (row_ids, offsets) in zip(items, encoder(items), strict=True):
            row_labels, merged = _label(row_ids, offsets, item)
            report.longest = max(report.longest, len(row_ids))
            parts = pieces(row_ids, row_labels, max_length, truncation, tokenizer.bos_token_id)
            if not parts:
                dropped[TOO_LONG] += 1
                continue
            counts = [sum(label != IGNORE for label in part_labels[1:]) for _, part_labels in parts]
            kept = [part for part, count in zip(parts, counts, strict=True) if count]
            cut = bool(max_length) and len(row_ids) > (max_length or 0)
            if not kept:
                dropped["nothing supervised within max_length" if cut else "nothing supervised"] += 1
                continue
            for part_ids, part_labels in kept:
                ids.extend(part_ids)
                labels.extend(part_labels)
                ends.append(len(ids))
            if cut:
                count_cut(report, truncation, len(kept))
                report.empty_pieces += len(parts) - len(kept)
            report.supervised_tokens += sum(counts)
            report.merged += merged
            if not (cut and truncation == "keep_start"):
                report.stopped += _ends_in(kept[-1][1], stops, tokenizer)
    report.rows_kept, report.tokens, report.dropped = len(ends) - 1, len(ids), dict(dropped)
    if template is not None:
        report.warnings += template.warnings
    return TokenizedData(_dataset(ids, labels, ends), report)


def stop_ids(tokenizer: Any) -> list[int]:
    """Ids at which generation has to stop: the end-of-sequence token, and the tokens with which the chat template ends
    an assistant turn and one that calls a tool, where those are others. For the saved generation config.

    Raises:
        UserError: there is neither.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    try:
        template = ChatTemplate(tokenizer)
        ends = [template.end_token, template.call_end]
    except UserError:  # no template, or one that cannot hold a conversation: then eos alone is what there is
        ends = []
    for token in filter(None, ends):
        turn_end = tokenizer.convert_tokens_to_ids(token)
        if turn_end is not None and turn_end not in ids:
            ids.append(turn_end)
    if not ids:
        raise UserError(
            "The tokenizer has no eos_token and its chat template writes no end-of-turn token: "
            "a model trained with it could not stop. Set eos_token in tokenizer_config.json."
        )
    return ids


def _is_chat(row: dict[str, Any]) -> bool:
    return "messages" in row or isinstance(row.get("prompt"), list)


def _encodable(row: dict[str, Any], template: ChatTemplate | None, number: int, loss_on: LossOn) -> _Encodable:
    if template is not None and _is_chat(row):
        return _Encodable(*_conversation(row, template, number, loss_on), True)
    if "text" in row:
        return _Encodable(row["text"], None, False)
    if not isinstance(loss_on, str):
        raise UserError(f"Row {number} is plain text, which has no roles: set objective.loss_on to completion or all.")
    text = row["prompt"] + row["completion"]
    return _Encodable(text, None if loss_on == "all" else [(len(row["prompt"]), len(text))], False)


def _conversation(
    row: dict[str, Any], template: ChatTemplate, number: int, loss_on: LossOn
) -> tuple[str, list[Span] | None]:
    """A conversation's text, and the spans of it to train on; None: everything."""
    prompt = row.get("prompt", []) if "messages" not in row else []
    turns = row["messages"] if "messages" in row else [*prompt, *row["completion"]]
    tools = row.get("tools")
    silent = [i for i, turn in enumerate(turns) if turn.get("train") is False]
    if loss_on == "all":
        text, spans = template.locate(turns, silent, number, tools)
        return text, _between(spans, len(text)) if spans else None
    roles = ("assistant",) if isinstance(loss_on, str) else loss_on
    first = len(prompt) if loss_on == "completion" else 0
    wanted = [i for i in range(first, len(turns)) if turns[i]["role"] in roles and i not in silent]
    return template.locate(turns, wanted, number, tools)


def _between(spans: list[Span], length: int) -> list[Span]:
    """What the spans leave of a text."""
    bounds = [0, *(bound for span in spans for bound in span), length]
    return [(start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=True) if start < end]


# Text and spans -> ids and labels


class _Encoder:
    """Encodes with character offsets, and puts the tokenizer's own special tokens around plain text."""

    def __init__(self, tokenizer: Any):
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: it cannot say where in the text a "
                "token stands, so that the supervised part cannot be found. Use one with a tokenizer.json."
            )
        self.tokenizer, self.eos = tokenizer, tokenizer.eos_token_id
        self.backend = _exact_backend(tokenizer)
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a")["input_ids"]
        at = next((i for i in range(len(whole)) if bare and whole[i : i + len(bare)] == bare), 0)
        self.prefix, self.suffix = whole[:at], whole[at + len(bare) :]
        self.checked = False

    def __call__(self, items: Sequence[_Encodable]) -> Iterator[tuple[list[int], list[Span]]]:
        texts = [item.text for item in items]
        for item, encoding in zip(items, self.backend.encode_batch(texts, add_special_tokens=False), strict=True):
            ids, offsets = encoding.ids, encoding.offsets
            if not self.checked:
                self._check(item.text, ids)
            yield (ids, offsets) if item.chat else self._complete(ids, offsets, len(item.text))

    def _complete(self, ids: list[int], offsets: list[Span], length: int) -> tuple[list[int], list[Span]]:
        """Add what the tokenizer adds, and the end token, unless the text holds them already."""
        if self.eos is None:
            raise UserError("The tokenizer has no eos_token: the model could not learn to stop. Set one.")
        prefix = [] if ids[: len(self.prefix)] == self.prefix else self.prefix
        suffix = self.suffix if self.eos in self.suffix else [*self.suffix, self.eos]
        suffix = [] if ids[-len(suffix) :] == suffix else suffix
        # The suffix gets a place of its own after the text, inside of no span but the one that ends there.
        return (
            [*prefix, *ids, *suffix],
            [*[(-1, -1)] * len(prefix), *offsets, *[(length, length)] * len(suffix)],
        )

    def _check(self, text: str, ids: list[int]) -> None:
        # Some tokenizers change the text in Python before the backend sees it.
        if ids != self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise UserError(
                f"{type(self.tokenizer).__name__} encodes otherwise than its tokenizer.json says; "
                "the supervised part cannot be found with it."
            )
        self.checked = True


def _exact_backend(tokenizer: Any) -> Any:
    """A copy of the tokenizer's backend without truncation, padding and trimmed offsets.

    Trimming (GPT-2's way) hides that the token of " yes" holds the space in front, and with it that the
    token straddles a boundary between the space and the word.
    """
    from tokenizers import Tokenizer

    def untrim(node: Any) -> None:
        if isinstance(node, dict):
            if "trim_offsets" in node:
                node["trim_offsets"] = False
            for value in node.values():
                untrim(value)
        elif isinstance(node, list):
            for value in node:
                untrim(value)

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    untrim(state.get("post_processor"))
    state["truncation"] = state["padding"] = None
    return Tokenizer.from_str(json.dumps(state))


def _label(ids: list[int], offsets: list[Span], item: _Encodable) -> tuple[list[int], bool]:
    """The labels, and whether a token straddles the start of a span."""
    if item.spans is None:
        return list(ids), False
    labels, merged = [IGNORE] * len(ids), False
    starts = [start for start, _ in item.spans]
    added = len(item.text) if not item.chat else -1  # where the end token stands that no text has
    for index, (start, end) in enumerate(offsets):
        at = bisect_right(starts, start) - 1
        if at >= 0 and (end <= item.spans[at][1] if start < item.spans[at][1] else start == end == added):
            labels[index] = ids[index]
        # A token that begins before a span and ends in it belongs to the prompt.
        merged = merged or (at + 1 < len(starts) and start < starts[at + 1] < end)
    return labels, merged


def _ends_in(labels: list[int], stops: set[int], tokenizer: Any) -> bool:
    for label in reversed(labels):
        if label in stops:
            return True
        # With loss_on "all" the line break after the last turn is labelled too.
        if label != IGNORE and tokenizer.decode([label]).strip():
            return False
    return False


def _batches(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch


def _dataset(ids: array, labels: array, ends: list[int]) -> Any:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset

    offsets = pa.array(ends, pa.int32())
    columns = {
        name: pa.ListArray.from_arrays(offsets, pa.array(np.frombuffer(values, dtype=np.int32)))
        for name, values in (("input_ids", ids), ("labels", labels))
    }
    return Dataset(pa.table(columns))


def _nothing_left(report: TokenizationReport, max_length: int | None, truncation: str) -> str:
    if not report.rows:
        return "No rows to tokenise."
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.dropped.items()))
    return (
        f"None of the {report.rows} rows is left to train on: {causes}. train.max_length is {max_length} and "
        f"data.truncation is {truncation}; the longest row has {report.longest} tokens. Raise train.max_length."
    )
