"""Documents of the tasks in `tasks/`, from the built-in data sets, as lm-evaluation-harness takes them.

The harness calls a function with all of a task's metadata, and with what its own command line adds; `rows` is how many
documents there are at most.
"""

import random
from typing import TYPE_CHECKING, Any

from ..data.builtin import BUILT_IN, Loaded, in_held_out_part

if TYPE_CHECKING:
    from datasets import Dataset

# The groups that a recipe holds out with this seed, and with this share or a larger one.
HELD_OUT, SEED = 0.02, 0
CHOICES = 4


def text(*, rows: int, **other: Any) -> "dict[str, Dataset]":
    """Held-out modules of Python's library: `text`."""
    return _split(_held_out(BUILT_IN["stdlib-text"].load())[:rows])


def text_of(document: dict[str, Any]) -> str:
    """As it is: a template would read source code that looks like one."""
    return document["text"]


def docstrings(*, rows: int, **other: Any) -> "dict[str, Dataset]":
    """Held-out functions: `question`, `choices`, their docstring and others' in an order of their own, and `label`."""
    held_out = _held_out(BUILT_IN["stdlib-docstrings"].load())
    answers = sorted({row["completion"][-1]["content"] for row in held_out})
    chance, documents = random.Random(SEED), []
    for row in chance.sample(held_out, min(rows, len(held_out))):
        right = row["completion"][-1]["content"]
        wrong = chance.sample([answer for answer in answers if answer != right], CHOICES - 1)
        documents.append(_choice(row["prompt"][-1]["content"], right, wrong, chance))
    return _split(documents)


def halueval(*, rows: int, **other: Any) -> "dict[str, Dataset]":
    """Questions on a passage: `question`, `choices`, `label`. Fetched once."""
    chance = random.Random(SEED)
    loaded = BUILT_IN["halueval-qa"].load().rows
    return _split(
        [
            _choice(
                row["prompt"][-1]["content"], row["chosen"][-1]["content"], [row["rejected"][-1]["content"]], chance
            )
            for row in chance.sample(loaded, min(rows, len(loaded)))
        ]
    )


def passkey(*, rows: int, words: int, **other: Any) -> "dict[str, Dataset]":
    """`prompt` and `answer`, of at most so many words."""
    return _split(BUILT_IN["passkey"].load(rows=rows, words=words, seed=SEED).rows)


def gsm8k(*, rows: int, **other: Any) -> "dict[str, Dataset]":
    """`question` and `answer`, the number. Fetched once."""
    loaded = BUILT_IN["gsm8k"].load().rows[:rows]
    return _split([{"question": row["prompt"][-1]["content"], "answer": row["answer"]} for row in loaded])


def _held_out(loaded: Loaded) -> list[dict[str, Any]]:
    pairs = zip(loaded.rows, loaded.groups, strict=True)
    return [row for row, group in pairs if in_held_out_part(group, eval_fraction=HELD_OUT, seed=SEED)]


def _choice(question: str, right: str, wrong: list[str], chance: random.Random) -> dict[str, Any]:
    choices = [right, *wrong]
    chance.shuffle(choices)
    return {"question": question, "choices": choices, "label": choices.index(right)}


def _split(documents: list[dict[str, Any]]) -> "dict[str, Dataset]":
    from datasets import Dataset

    return {"test": Dataset.from_list(documents)}
