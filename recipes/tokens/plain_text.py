"""Plain text as rows for language models: blocks and packed documents for decoders, pieces and pairs for encoders.

Sentence pairs follow BERT (arXiv:1810.04805, appendix A.2), except that the second text of a pair that does not belong
together is about as long as the one it replaces: length would give the answer away otherwise.
"""

import random
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any, Literal, NamedTuple

from ..errors import UserError
from .best_fit import best_fit, parts
from .report import IGNORE, TokenizationReport, TokenizedData, row_wise
from .truncation import TOO_LONG, Piece, Truncation, count_cut, pieces

_BATCH = 512
# Where one sentence ends and the next begins: at a line break, and behind a full stop or its like.
_SENTENCE_END = re.compile(r"\n+|(?<=[.!?])\s+|(?<=[。！？])\s*")

# Stretches that are drawn to replace a text; the one nearest to it in length is taken.
_TRIES = 10

Row = dict[str, Any]


class _Table:
    """Grows a data set row by row; columns of lists lie in flat arrays."""

    def __init__(self) -> None:
        self.lists: dict[str, array] = {}
        self.numbers: dict[str, array] = {}
        self.ends = array("q", [0])

    def add(self, **row: Any) -> None:
        for name, value in row.items():
            if isinstance(value, int):
                self.numbers.setdefault(name, array("q")).append(value)
            else:
                self.lists.setdefault(name, array("i")).extend(value)
        self.ends.append(len(self.lists["input_ids"]))

    def dataset(self) -> Any:
        import numpy as np
        import pyarrow as pa
        from datasets import Dataset

        ends = pa.array(np.frombuffer(self.ends, dtype=np.int64))
        columns = {
            name: pa.LargeListArray.from_arrays(ends, pa.array(np.frombuffer(values, dtype=np.int32)))
            for name, values in self.lists.items()
        }
        columns |= {name: pa.array(np.frombuffer(values, dtype=np.int64)) for name, values in self.numbers.items()}
        return Dataset(pa.table(columns))


# For decoders


def tokenize_documents(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    max_length: int,
    packing: Literal["blocks", "documents", "none"],
    truncation: Truncation = "drop",
) -> TokenizedData:
    """Texts for a causal model, each with the tokenizer's own special tokens and one end token.

    Every token is kept but of `none`. Rows have `input_ids` and `labels`, with `documents` also `position_ids`.

    Args:
        max_length: tokens of a block, or of the longest row.
        packing: "blocks": all texts one after another, cut every `max_length` tokens; the last block is shorter.
            "documents": texts whole where they fit, else cut into parts of `max_length`, are packed into rows by best
            fit; positions start again with each, so that none sees another, and its first token is not predicted.
            "none": a row for each text.
        truncation: with "none", what becomes of a longer text, see `truncation.pieces`.

    Raises:
        UserError: no row is left.
    """
    report, dropped = TokenizationReport(), Counter[str]()
    texts = list(_ended(rows, tokenizer, report))
    report.longest = max(map(len, texts), default=0)
    table = _Table()
    for ids, lengths in _PACKINGS[packing](texts, max_length):
        positions = [i for length in lengths or [len(ids)] for i in range(length)]
        # Nothing before a first token predicts it.
        labels = [token if position else IGNORE for token, position in zip(ids, positions, strict=True)]
        parts = pieces(list(ids), labels, max_length, truncation, tokenizer.bos_token_id)
        if not parts:
            dropped[TOO_LONG] += 1
        elif not _add_parts(table, report, parts, positions if packing == "documents" else None):
            dropped["nothing to predict"] += 1
        elif len(ids) > max_length:
            count_cut(report, truncation, len(parts))
    # Of packed rows no end is lost; a row that was cut at its end has lost its own.
    lost = report.truncated if truncation == "keep_start" else report.continued
    report.stopped, report.dropped = report.rows_kept - lost, dict(dropped)
    return _finished(table, report, max_length)


def _add_parts(table: _Table, report: TokenizationReport, parts: list[Piece], positions: list[int] | None) -> int:
    """Add rows in which something is predicted, and count them; how many that is."""
    added = 0
    for ids, labels in parts:
        supervised = sum(label != IGNORE for label in labels)
        if supervised:
            table.add(input_ids=ids, labels=labels, **({} if positions is None else {"position_ids": positions}))
            report.supervised_tokens += supervised
            report.tokens += len(ids)
            added += 1
    report.rows_kept += added
    return added


def _ended(rows: Iterable[Row], tokenizer: Any, report: TokenizationReport) -> Iterator[list[int]]:
    """The tokens of each text, with one end token."""
    for batch in _batches(rows, _BATCH):
        for ids in tokenizer([row["text"] for row in batch])["input_ids"]:
            report.rows += 1
            yield ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def _blocks(texts: list[list[int]], size: int) -> Iterator[tuple[Sequence[int], list[int]]]:
    stream = array("i")
    for ids in texts:
        stream.extend(ids)
    for start in range(0, len(stream), size):
        yield stream[start : start + size], []


def _documents(texts: list[list[int]], size: int) -> Iterator[tuple[Sequence[int], list[int]]]:
    import numpy as np

    lengths = np.array([len(ids) for ids in texts], dtype=np.int64)
    starts, owners = parts(lengths, size)
    order, bounds = best_fit(np.minimum(lengths[owners] - starts, size), size)
    starts, owners = starts[order], owners[order]
    for begin, end in pairwise(bounds.tolist()):
        places = zip(owners[begin:end].tolist(), starts[begin:end].tolist(), strict=True)
        pieces = [texts[text][start : start + size] for text, start in places]
        yield list(chain.from_iterable(pieces)), [len(piece) for piece in pieces]


def _single(texts: list[list[int]], size: int) -> Iterator[tuple[Sequence[int], list[int]]]:
    yield from ((ids, []) for ids in texts)


_PACKINGS = {"blocks": _blocks, "documents": _documents, "none": _single}


# For encoders


def _finish_pieces(report: TokenizationReport, *, max_length: int, mlm_probability: float, **others: Any) -> None:
    """Count the tokens that will be hidden, of those that can be.

    Raises:
        UserError: no row is left.
    """
    report.supervised_tokens = round(report.supervised_tokens * mlm_probability)
    _require_rows(report, max_length)


@row_wise(_finish_pieces)
def tokenize_pieces(
    rows: Iterable[Row], tokenizer: Any, *, max_length: int, mlm_probability: float, whole_word: bool
) -> TokenizedData:
    """Texts for a masked model: each is cut into pieces of at most `max_length` tokens, special tokens included.

    Rows have `input_ids`, `special_tokens_mask` and, for whole words, `words`: the number of each token's word.

    Args:
        mlm_probability: share of tokens that will be hidden, for the report: it counts the expected number.

    Raises:
        UserError: no row is left.
    """
    report, dropped, table = TokenizationReport(), Counter[str](), _Table()
    for batch in _batches(rows, _BATCH):
        texts = [row["text"] for row in batch]
        report.rows += len(texts)
        pieces = tokenizer(
            texts,
            truncation=True,
            max_length=max_length,
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
        )
        for index in range(len(pieces["input_ids"])):
            _add_masked(table, report, dropped, pieces, index, whole_word)
    report.stopped, report.dropped = report.rows_kept, dict(dropped)
    return TokenizedData(table.dataset(), report)


def _add_masked(
    table: _Table,
    report: TokenizationReport,
    dropped: Counter[str],
    encoded: Any,
    index: int,
    whole_word: bool,
    **columns: Any,
) -> None:
    """One row of a batch that the tokenizer has encoded, unless there is nothing in it to hide."""
    ids, special = encoded["input_ids"][index], encoded["special_tokens_mask"][index]
    if all(special):
        dropped["no token to hide"] += 1
        return
    if whole_word:
        columns["words"] = [-1 if word is None else word for word in encoded.word_ids(index)]
    table.add(input_ids=ids, special_tokens_mask=special, **columns)
    report.longest = max(report.longest, len(ids))
    report.rows_kept += 1
    report.tokens += len(ids)
    report.supervised_tokens += len(ids) - sum(special)


class _Document(NamedTuple):
    """A text, and of each sentence in it where it stands and its number of tokens."""

    text: str
    spans: list[tuple[int, int]]
    lengths: list[int]

    def slice(self, start: int, end: int) -> str:
        """Sentences `start` to `end`, the latter not included, as they stand in the text."""
        return self.text[self.spans[start][0] : self.spans[end - 1][1]]


class _Pair(NamedTuple):
    first: str
    second: str
    follows: bool


def tokenize_pairs(
    rows: Iterable[Row], tokenizer: Any, *, max_length: int, mlm_probability: float, whole_word: bool, seed: int
) -> TokenizedData:
    """Texts for BERT's pair of objectives: two stretches of text a row, joined by the tokenizer's own pair method.

    A text is cut into stretches of whole sentences that fill `max_length`, and each at a random place into two. In half
    of the rows, chosen at random, the second is replaced by a stretch of another text. Rows have the columns of
    `tokenize_pieces`, `token_type_ids`, and `next_sentence_label`: 0 where the second follows the first, else 1.

    Args:
        seed: of places, choices and replacements, each from anywhere in another text.

    Raises:
        UserError: fewer than two texts of at least two sentences, or no row left.
    """
    report, dropped = TokenizationReport(), Counter[str]()
    documents = []
    for batch in _batches(rows, _BATCH):
        report.rows += len(batch)
        for document in _sentences([row["text"] for row in batch], tokenizer):
            if len(document.spans) < 2:
                dropped["a single sentence"] += 1
            else:
                documents.append(document)
    if len(documents) < 2:
        raise UserError(
            f"objective mlm-nsp: {len(documents)} of {report.rows} texts have two sentences or more, and at least two "
            "such texts are needed on each side: a sentence that does not follow comes from another one. Sentences end "
            "at line breaks and behind '.', '!' and '?'"
        )
    room = max_length - tokenizer.num_special_tokens_to_add(pair=True)
    table = _Table()
    for batch in _batches(_pairs(documents, room, random.Random(seed)), _BATCH):
        encoded = tokenizer(
            [pair.first for pair in batch],
            [pair.second for pair in batch],
            truncation="longest_first",
            max_length=max_length,
            return_token_type_ids=True,
            return_special_tokens_mask=True,
        )
        for index, pair in enumerate(batch):
            columns = {
                "token_type_ids": encoded["token_type_ids"][index],
                "next_sentence_label": int(not pair.follows),
            }
            _add_masked(table, report, dropped, encoded, index, whole_word, **columns)
            report.truncated += bool(encoded.encodings[index].overflowing)
    report.supervised_tokens = round(report.supervised_tokens * mlm_probability)
    report.stopped, report.dropped = report.rows_kept, dict(dropped)
    return _finished(table, report, max_length)


def _sentences(texts: list[str], tokenizer: Any) -> Iterator[_Document]:
    spans = [_spans(text) for text in texts]
    flat = [text[start:end] for text, own in zip(texts, spans, strict=True) for start, end in own]
    counts = iter([len(ids) for ids in tokenizer(flat, add_special_tokens=False)["input_ids"]] if flat else [])
    for text, own in zip(texts, spans, strict=True):
        lengths = list(islice(counts, len(own)))
        # What the tokenizer leaves nothing of, such as a line of control characters, is no sentence.
        held = [index for index, length in enumerate(lengths) if length]
        yield _Document(text, [own[index] for index in held], [lengths[index] for index in held])


def _spans(text: str) -> list[tuple[int, int]]:
    """Where the sentences of a text stand, blank space around them left out."""
    found, start = [], 0
    for end, after in [*(match.span() for match in _SENTENCE_END.finditer(text)), (len(text), len(text))]:
        inside = text[start:end]
        if inside.strip():
            left = start + len(inside) - len(inside.lstrip())
            found.append((left, left + len(inside.strip())))
        start = after
    return found


def _pairs(documents: list[_Document], room: int, rng: random.Random) -> Iterator[_Pair]:
    """Stretches of each document in turn, of at most `room` tokens where its sentences allow it."""
    for number, document in enumerate(documents):
        start = 0
        while len(document.spans) - start >= 2:
            end = start + 2
            used = sum(document.lengths[start:end])
            while end < len(document.spans) and used + document.lengths[end] <= room:
                used += document.lengths[end]
                end += 1
            middle = rng.randrange(start + 1, end)
            first = document.slice(start, middle)
            if rng.random() < 0.5:
                yield _Pair(first, document.slice(middle, end), True)
                start = end
            else:
                wanted = sum(document.lengths[middle:end])
                others = [rng.randrange(len(documents) - 1) for _ in range(_TRIES)]
                stretches = [_stretch(documents[n + (n >= number)], wanted, rng) for n in others]
                yield _Pair(first, min(stretches, key=lambda found: abs(found[0] - wanted))[1], False)
                start = middle  # what did not follow is read next


def _stretch(document: _Document, wanted: int, rng: random.Random) -> tuple[int, str]:
    """Number of tokens and text of whole sentences, if possible of at most `wanted` tokens.

    They stand anywhere but at the beginning of the text, since nothing that follows stands there.
    """
    start = rng.randrange(1, len(document.spans))
    end, used = start + 1, document.lengths[start]
    while end < len(document.spans) and used + document.lengths[end] <= wanted:
        used += document.lengths[end]
        end += 1
    return used, document.slice(start, end)


# Both


def _finished(table: _Table, report: TokenizationReport, max_length: int) -> TokenizedData:
    _require_rows(report, max_length)
    return TokenizedData(table.dataset(), report)


def _require_rows(report: TokenizationReport, max_length: int) -> None:
    if not report.rows_kept:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.dropped.items())) or "no text"
        raise UserError(
            f"None of the {report.rows} texts leaves anything to train on: {causes}. objective.max_length is "
            f"{max_length} and the longest row has {report.longest} tokens"
        )


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
