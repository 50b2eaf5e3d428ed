"""Where known parts stand in a text: string matching that gives one answer or none."""

import re
from collections.abc import Callable, Sequence
from itertools import product

Span = tuple[int, int]
_TRIMS: tuple[Callable[[str], str], ...] = (str, str.strip, str.rstrip, str.lstrip)


def placed(pieces: Sequence[str], contents: Sequence[tuple[str, str]], text: str) -> list[Span] | None:
    """Where contents stand between fixed pieces: `text` must be piece, content, piece, ..., piece.

    Args:
        pieces: one more than contents.
        contents: (kind, content); those of one kind stand there as they are, or all are trimmed in one way.

    Returns:
        The (start, end) of each content; None where they do not make up the text, or in more than one way.
    """
    if len(pieces) != len(contents) + 1:
        return None
    found = _joined(pieces, [content for _, content in contents], text)
    if found:  # trimmed contents are shorter, so that nothing else has this length
        return found
    kinds = sorted({kind for kind, content in contents if content != content.strip()})
    several = set()
    for trims in product(_TRIMS, repeat=len(kinds)):
        trim = dict(zip(kinds, trims, strict=True))
        found = _joined(pieces, [trim.get(kind, str)(content) for kind, content in contents], text)
        if found:
            several.add(tuple(found))
    return list(several.pop()) if len(several) == 1 else None


def _joined(pieces: Sequence[str], contents: Sequence[str], text: str) -> list[Span] | None:
    if sum(map(len, pieces)) + sum(map(len, contents)) != len(text):
        return None
    spans, position = [], 0
    for piece, content in zip(pieces, [*contents, ""], strict=True):
        if not text.startswith(piece, position):
            return None
        position += len(piece)
        if not text.startswith(content, position):
            return None
        spans.append((position, position + len(content)))
        position += len(content)
    return spans[:-1]


def between(anchors: Sequence[str], text: str) -> list[Span] | None:
    """Where the gaps between anchors are: `text` must be anchor, gap, anchor, ..., anchor.

    Returns:
        The (start, end) of each gap; None where the anchors are not there, or could stand elsewhere too.
    """
    first, *inner, last = anchors
    if len(text) < len(first) + len(last) or not (text.startswith(first) and text.endswith(last)):
        return None
    left, right = len(first), len(text) - len(last)
    earliest, position = [], left
    for anchor in inner:
        position = text.find(anchor, position, right)
        if position < 0:
            return None
        earliest.append(position)
        position += len(anchor)
    latest, position = [], right
    for anchor in reversed(inner):
        position = text.rfind(anchor, left, position)
        latest.append(position)
    if earliest != latest[::-1]:
        return None
    starts = [left, *(at + len(anchor) for at, anchor in zip(earliest, inner, strict=True))]
    return list(zip(starts, [*earliest, right], strict=True))


def squeezed(text: str) -> str:
    """A text without its blank space."""
    return re.sub(r"\s+", "", text)


def stems_from(written: str, content: str, lead: str) -> bool:
    """Whether a template made `written` of an answer: its characters but for blank space, behind what it writes before
    every answer or not; reasoning in front, which ends in a tag, may be left out."""
    answer, whole = squeezed(content), squeezed(written)
    for text in {whole, whole.removeprefix(squeezed(lead))}:
        if text == answer:
            return True
        if text and answer.endswith(text) and answer[: -len(text)].endswith((">", "]")):
            return True
    return False
