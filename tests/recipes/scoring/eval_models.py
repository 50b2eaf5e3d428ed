"""Tiny models in folders, and rows to measure them on."""

import json
from pathlib import Path

from anyformer.recipes.scoring.run import evaluate
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer

# Positions or shape -> fields of the config, and the head.
MODELS = {
    "rope": ({"position_embedding": "rope"}, "causal_lm"),
    "alibi": ({"position_embedding": "alibi"}, "causal_lm"),
    "learned": ({"position_embedding": "learned"}, "causal_lm"),
    "encoder-decoder": (
        {"architecture": "encoder-decoder", "position_embedding": "relative", "decoder_start_token_id": 0},
        "seq2seq_lm",
    ),
    "classifier": (
        {"architecture": "encoder", "position_embedding": "learned", "num_labels": 3},
        "sequence_classification",
    ),
}
TEXTS = [
    {"text": text}
    for text in (
        "The cat sat on the mat,  and the dog on the log.\n",
        "Ein Tag wie jeder andere: über den Bäumen lag Nebel.",
        "x",
        "one two three four five six seven eight nine ten " * 4,
        "def add(a, b):\n    return a + b",
    )
]
PAIRS = [
    {"prompt": f"{'very ' * (i % 4)}long {i}: ", "completion": answer}
    for i, answer in enumerate(("one", "two words", "three, no four", "five", "a six", "seven and eight", "nine"))
]
LABELS = [{"text": "ab " * (i % 5 + 1) + str(i), "label": i % 3} for i in range(11)]


def save(model, folder: Path, side: str = "right") -> Path:
    """A folder with the model and the byte tokenizer, which pads on a side of its own."""
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = side
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def values(folder: Path, on: Path, **options) -> dict[str, float]:
    """Name -> figure."""
    options.setdefault("tell", lambda text: None)
    return {score["name"]: score["value"] for score in evaluate(str(folder), str(on), **options)["scores"]}
