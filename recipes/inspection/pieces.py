"""A sequence token by token, as a person reads it."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..tokens.report import IGNORE
from ..tokens.views import TokenSequence

SPACE, NEWLINE, TAB = "·", "↵", "⇥"
_CONTROLS = {"\r": "␍", "\t": TAB, "\n": NEWLINE, " ": SPACE}


class Piece(NamedTuple):
    """A token.

    Attributes:
        text: with marks in the place of spaces and line breaks.
        breaks: line breaks in it.
        note: what is learned there, where it is not the token itself.
        starts: a further document of a packed row begins with it.
    """

    place: int
    id: int
    text: str
    breaks: int = 0
    learned: bool = False
    special: bool = False
    note: str = ""
    starts: bool = False


class Gap(NamedTuple):
    """Stands for tokens that are not shown, and for the beginnings of documents among them."""

    tokens: int
    documents: int = 0

    @property
    def words(self) -> str:
        begin = f", {self.documents:,} documents begin" if self.documents else ""
        return f"… {self.tokens:,} tokens{begin} …"


def pieces(sequence: TokenSequence, tokenizer: Any, *, limit: int) -> list[Piece | Gap]:
    """The tokens of a sequence, at most `limit` of them: the first ones and the last, where it ought to stop."""
    ids, special = sequence.ids, special_ids(tokenizer)
    tail = limit // 4
    cut = len(ids) > limit
    places = [*range(limit - tail), *range(len(ids) - tail, len(ids))] if cut else range(len(ids))
    found: list[Piece | Gap] = []
    starts = set(sequence.starts)
    for place in places:
        if cut and place == len(ids) - tail:
            hidden = sum(limit - tail <= start < place for start in starts)
            found.append(Gap(len(ids) - limit, hidden))
        marked = ids[place] in special  # decoders put spaces around some of these
        text = tokenizer.convert_ids_to_tokens(ids[place]) if marked else token_text(ids, place, tokenizer)
        shown = visible(text)
        found.append(
            Piece(
                place,
                ids[place],
                shown,
                text.count("\n"),
                sequence.labels[place] != IGNORE,
                marked,
                visible(sequence.notes.get(place, "")),
                place in starts,
            )
        )
    return found


def special_ids(tokenizer: Any) -> set[int]:
    """Tokens that no text holds: the tokenizer's special ones, those added as such included."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def token_text(ids: Sequence[int], place: int, tokenizer: Any) -> str:
    """The text that a token adds to the one before it; the bytes of one that is no whole character."""
    before = ids[place - 1 : place] if place else []
    head, both = (
        tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in (before, [*before, ids[place]])
    )
    text = both[len(head) :] if both.startswith(head) else ""
    if text and "\ufffd" not in text:
        return text
    text = tokenizer.decode([ids[place]], clean_up_tokenization_spaces=False)
    token = str(tokenizer.convert_ids_to_tokens(ids[place]))
    if "\ufffd" in text:
        known = _bytes_of_characters()
        if all(character in known for character in token):
            return "‹" + "-".join(f"{known[character]:02X}" for character in token) + "›"
        return token
    return text or token


@lru_cache
def _bytes_of_characters() -> dict[str, int]:
    """The bytes that the characters of a byte-level vocabulary stand for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def visible(text: str) -> str:
    """A text in which each blank and control character is to be seen."""
    return "".join(_CONTROLS.get(char, char if char.isprintable() else f"‹U+{ord(char):04X}›") for char in text)
