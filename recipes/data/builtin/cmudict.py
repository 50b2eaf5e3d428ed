"""The CMU Pronouncing Dictionary: English words letter by letter, and their sounds in ARPAbet."""

import json
import re
from pathlib import Path

from .base import Loaded
from .fetch import fetch_npm

PACKAGE = ("cmu-pronouncing-dictionary", "3.0.0")
_FILE = ("package/index.js", "ef8b2b976d2e5801b7541ebcc7714f538d1ffa0ebb28645259536e2666bd2948")
_WORD = re.compile(r"[a-z']*[a-z][a-z']*")


def load() -> Loaded:
    """`{"source": "w o r d", "target": "W ER1 D"}`, 124,920 words."""
    return parse(fetch_npm(*PACKAGE, *_FILE))


def parse(path: Path) -> Loaded:
    """Kept are words of letters and apostrophes with their first pronunciation, without comments. A word and its
    possessive are one group."""
    script = path.read_text(encoding="utf-8")
    # The script holds one object literal that is also JSON; it is read, not run.
    entries = json.loads(script[script.index("= {") + 2 : script.rindex("}") + 1])
    loaded = Loaded()
    for word, sounds in entries.items():
        if _WORD.fullmatch(word):
            stem = word.removesuffix("'s").removesuffix("'") or word
            loaded.add({"source": " ".join(word), "target": sounds.split("#")[0].strip()}, stem)
    return loaded
