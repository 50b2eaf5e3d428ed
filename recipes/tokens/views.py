"""How a tokenised row is looked at: its sequences of tokens, and what is learned of each."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from .report import IGNORE

MARKS = ("⟦", "⟧")


class Length(NamedTuple):
    """A number of tokens that is held to a limit."""

    tokens: int
    limit: int


class TokenSequence(NamedTuple):
    """Tokens that a model reads or writes in one go.

    Attributes:
        ids: the tokens.
        labels: one for each token, -100 where nothing is learned.
        name: what tells it from the row's other sequences, such as "chosen".
        starts: the places where further documents begin, in a packed row.
        notes: place -> what is learned there, where it is not the token itself: a tag, or the token that is hidden.
        ends: what is learned of it ought to end in a stop token.
    """

    ids: Sequence[int]
    labels: Sequence[int]
    name: str = ""
    starts: Sequence[int] = ()
    notes: Mapping[int, str] = {}
    ends: bool = False

    @property
    def documents(self) -> list[tuple[int, int]]:
        """(start, end) of each document."""
        bounds = [0, *self.starts, len(self.ids)]
        return list(pairwise(bounds))


class RowView(NamedTuple):
    """A row of a tokenised data set.

    Attributes:
        sequences: its sequences, one after the other.
        beside: sequences that are compared with one another, such as chosen and rejected; each follows the first ones.
        lengths: what is counted against a limit, by name.
        label: what is learned of the row as a whole, in words.
        classes: names of the classes in it, to be counted.
        value: the number to predict.
    """

    sequences: tuple[TokenSequence, ...]
    beside: tuple[TokenSequence, ...] = ()
    lengths: Mapping[str, Length] = {}
    label: str = ""
    classes: tuple[str, ...] = ()
    value: float | None = None

    @property
    def all_sequences(self) -> tuple[TokenSequence, ...]:
        return (*self.sequences, *self.beside)


def read_only(ids: Sequence[int], name: str = "") -> TokenSequence:
    """Tokens of which none is learned."""
    return TokenSequence(ids, [IGNORE] * len(ids), name)


def learned(ids: Sequence[int], name: str = "", *, ends: bool = True) -> TokenSequence:
    """Tokens of which each is learned."""
    return TokenSequence(ids, ids, name, ends=ends)


def answered(prompt: Sequence[int], answer: Sequence[int]) -> TokenSequence:
    """A prompt with the answer that is learned."""
    return TokenSequence([*prompt, *answer], [*[IGNORE] * len(prompt), *answer], ends=True)


def causal(row: Mapping[str, Any], *, ends: bool = True) -> TokenSequence:
    """A row of `input_ids` and `labels` for a decoder, packed ones too. Nothing predicts a first token."""
    # Rows of token shards are arrays; tokenizers take plain numbers.
    ids, labels = (
        values.tolist() if hasattr(values, "tolist") else values for values in (row["input_ids"], row["labels"])
    )
    return TokenSequence(ids, [IGNORE, *labels[1:]], starts=document_starts(row), ends=ends)


def document_starts(row: Mapping[str, Any]) -> list[int]:
    """Where the second and further documents of a packed row begin: where positions start again, or lengths say so."""
    if row.get("position_ids") is not None:
        return starts_in(row["position_ids"])
    starts, place = [], 0
    for length in (row.get("seq_lengths") or ())[:-1]:
        place += length
        starts.append(place)
    return starts


def starts_in(positions: Sequence[int]) -> list[int]:
    """Where positions start again."""
    return [place for place, position in enumerate(positions) if place and not position]


def row_text(view: RowView, tokenizer: Any, *, limit: int | None = None) -> str:
    """A row as text, special tokens included, what is learned between ⟦ and ⟧.

    Args:
        limit: tokens shown of each sequence.
    """
    parts = []
    for sequence in view.all_sequences:
        ids, labels = sequence.ids[:limit], sequence.labels[:limit]
        name = f"{sequence.name}: " if sequence.name else ""
        parts.append(name + marked_text(ids, labels, tokenizer, notes=sequence.notes))
    return " ".join([*parts, *([f"{MARKS[0]}{view.label}{MARKS[1]}"] if view.label else [])])


def marked_text(
    ids: Sequence[int],
    labels: Sequence[int],
    tokenizer: Any,
    *,
    notes: Mapping[int, str] | None = None,
    marks: tuple[str, str] = MARKS,
) -> str:
    """Tokens as text, what is learned between `marks`; a token with a note stands alone, as `⟦token→note⟧`."""
    notes, on = notes or {}, [label != IGNORE for label in labels]
    cuts = {i for i in range(1, len(ids)) if on[i] != on[i - 1] or i in notes or i - 1 in notes}
    bounds = [0, *sorted(cuts), len(ids)]
    # Growing prefixes, not pieces: some decoders drop the space that a piece begins with.
    texts = [tokenizer.decode(ids[:bound], clean_up_tokenization_spaces=False) for bound in bounds]
    parts = []
    for index, (start, end) in enumerate(pairwise(bounds)):
        part = texts[index + 1][len(texts[index]) :]
        if start < end and on[start]:
            note = f"→{notes[start]}" if start in notes else ""
            part = f"{marks[0]}{part}{note}{marks[1]}"
        parts.append(part)
    return "".join(parts)
