"""The passkey task: a number hidden somewhere in a long text of no interest, and asked for at its end.

Mohtashami and Jaggi 2023 (arXiv:2305.16300, sec. 4): whoever answers must look back over the whole text. The sentences
are the paper's. A key is written digit by digit with blanks between, so that any tokenizer sees the digits one by one.
"""

import random
from collections.abc import Mapping
from typing import Any

from ...errors import UserError
from .base import Loaded

INTRODUCTION = "There is a pass key hidden in this text. Find it and memorize it."
FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
ROWS, DIGITS = 2000, 4
# The defaults of `load`.
ARGUMENTS: dict[str, Any] = {"rows": ROWS, "words": [60, 100], "digits": DIGITS, "seed": 0}


def problem(arguments: Mapping[str, Any]) -> str | None:
    """Why `load` cannot take these arguments; None where it can."""
    if unknown := sorted(set(arguments) - set(ARGUMENTS)):
        return f"has {unknown[0]!r}, which is none of {', '.join(ARGUMENTS)}"
    given = ARGUMENTS | dict(arguments)
    for name, least in (("rows", 2), ("digits", 1), ("seed", 0)):
        if type(given[name]) is not int or given[name] < least:
            return f"{name} must be a whole number of at least {least}, found {given[name]!r}"
    words, shortest = given["words"], shortest_words(given["digits"])
    words = [words, words] if type(words) is int else words
    if not (isinstance(words, list) and len(words) == 2 and all(type(word) is int for word in words)):
        return f"words must be a number, or two: of the shortest and of the longest row, found {given['words']!r}"
    if not shortest <= words[0] <= words[1]:
        return f"words must be at least {shortest}, of which a row without filler consists, and rise: found {words}"
    if given["rows"] > 10 ** given["digits"]:
        return f"rows={given['rows']}: {given['digits']} digits make {10 ** given['digits']:,} keys; raise digits"
    return None


def load(rows: int = ROWS, words: Any = None, digits: int = DIGITS, seed: int = 0) -> Loaded:
    """`{"prompt": introduction, filler around the key, question, "completion": " 7 3 9 1.", "answer": "7 3 9 1",
    "depth": 0.4}`, every row with another key. A key is a group.

    Args:
        words: of a whole row between blanks, at most; or those of the shortest and of the longest, between which
            lengths are even. A tokenizer that knows the words makes about 1.2 tokens of one.
        digits: of a key.
        seed: the same gives the same rows.

    Raises:
        UserError: arguments that make no sense.
    """
    given = {"rows": rows, "digits": digits, "seed": seed} | ({} if words is None else {"words": words})
    if (fault := problem(given)) is not None:
        raise UserError(f"passkey: {fault}")
    span = ARGUMENTS["words"] if words is None else words
    low, high = span if isinstance(span, list) else (span, span)
    chance, loaded = random.Random(seed), Loaded()
    for number in chance.sample(range(10**digits), rows):
        key = " ".join(f"{number:0{digits}}")
        row = passkey_row(key, filler_within(chance.randint(low, high), digits), chance)
        loaded.add(row, key)
    return loaded


def passkey_row(key: str, sentences: int, chance: random.Random) -> dict[str, Any]:
    """A row with so many sentences of filler, the key at a depth drawn from `chance`."""
    first, before = chance.randrange(len(FILLER)), chance.randint(0, sentences)
    filler = [FILLER[(first + i) % len(FILLER)] for i in range(sentences)]
    hidden = [*filler[:before], NEEDLE.format(key=key), *filler[before:]]
    prompt, depth = " ".join([INTRODUCTION, *hidden, QUESTION]), before / sentences if sentences else 0.0
    return {"prompt": prompt, "completion": f" {key}.", "answer": key, "depth": depth}


def filler_within(words: int, digits: int) -> int:
    """Sentences of filler that fit into a row of so many words, wherever in the filler it begins."""
    room, lengths = words - shortest_words(digits), sorted((len(s.split()) for s in FILLER), reverse=True)
    rounds, rest = divmod(room, sum(lengths))
    more = 0
    while sum(lengths[: more + 1]) <= rest:
        more += 1
    return rounds * len(FILLER) + more


def shortest_words(digits: int) -> int:
    """Words of a row without filler."""
    fixed = sum(len(text.split()) for text in (INTRODUCTION, NEEDLE.replace("{key}", ""), QUESTION))
    return fixed + 3 * digits - 1  # full stops stand at the words before them
