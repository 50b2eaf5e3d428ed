"""How far back models find a key: exact answers of the passkey task, by length.

    python benchmarks/passkey.py runs/long-context/*                       # models as they are
    python benchmarks/passkey.py runs/long-context/short --extend 512      # and scaled, without training

The rows are made anew in lengths of tokens, with keys that the recipes hold out, at depths spread evenly. An answer
counts where all of its digits are right. With --extend LENGTH a model is measured also under each method of
`model.context_extension`, and under dynamic NTK, as if it had been made for that length.
"""

import argparse
import copy
import math
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from anyformer.recipes.context_extension import extend_context
from anyformer.recipes.data.builtin import in_held_out_part
from anyformer.recipes.data.builtin.passkey import passkey_row
from anyformer.recipes.evaluation import greedy_answers

METHODS = ("linear", "ntk", "dynamic", "yarn", "longrope")


def rows_of_length(tokenizer: Any, tokens: int, count: int, digits: int, seed: int) -> list[dict[str, Any]]:
    """Rows of at most so many tokens, answer included, and not a sentence less than fits."""
    chance, rows = random.Random(seed), []
    while len(rows) < count:
        key = " ".join(f"{chance.randrange(10**digits):0{digits}}")
        if in_held_out_part(key, eval_fraction=0.1, seed=0):
            rows.append(longest_row(tokenizer, tokens, key, chance))
    return rows


def longest_row(tokenizer: Any, tokens: int, key: str, chance: random.Random) -> dict[str, Any]:
    """The longest row with a key in it that has at most so many tokens."""

    def row(sentences: int) -> tuple[dict[str, Any], int]:
        made = passkey_row(key, sentences, random.Random(draw))
        return made, len(tokenizer(made["prompt"] + made["completion"])["input_ids"])

    draw, (_, least) = chance.random(), passkey_row_length(tokenizer, key)
    assert least <= tokens, f"a row without filler has {least} tokens"
    low, high = 0, tokens
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if row(middle)[1] <= tokens else (low, middle)
    return row(low)[0]


def passkey_row_length(tokenizer: Any, key: str) -> tuple[dict[str, Any], int]:
    made = passkey_row(key, 0, random.Random(0))
    return made, len(tokenizer(made["prompt"] + made["completion"])["input_ids"])


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, Any]], batch_size: int) -> float:
    """The share of rows whose key is answered exactly."""
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    longest = max(len(tokenizer(row["completion"])["input_ids"]) for row in rows)
    found = greedy_answers(model, tokenizer, prompts, max_new_tokens=longest, batch_size=batch_size)
    texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in found]
    return sum(text.startswith(row["answer"]) for text, row in zip(texts, rows, strict=True)) / len(rows)


def scaled(model: Any, method: str, length: int) -> Any:
    """The same weights under another rotary embedding."""
    config = copy.deepcopy(model.config)
    if method == "dynamic":
        factor = length / config.max_position_embeddings
        config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": factor}
    else:
        extend_context(config, method, length)
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="folders of models with their tokenizers")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--extend", type=int, metavar="LENGTH", help="also scaled to this length, without training")
    parser.add_argument("--rows", type=int, default=100, help="of each length")
    parser.add_argument("--digits", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1, help="of the rows")
    parser.add_argument("--batch-size", type=int, default=20)
    options = parser.parse_args()
    print(
        f"{options.rows} rows of each length, seed {options.seed}; half a 95 % interval is at most "
        f"{1.96 * math.sqrt(0.25 / options.rows):.2f}"
    )
    width = max(24, *(len(Path(path).name) + 20 for path in options.models))
    print(f"{'exact answers at tokens':{width}}" + "".join(f"{length:>8}" for length in options.lengths), flush=True)
    for path in options.models:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        rows = [rows_of_length(tokenizer, n, options.rows, options.digits, options.seed) for n in options.lengths]
        named = {Path(path).name: lambda model=model: model}
        if options.extend:
            methods = {f"{Path(path).name}, {name}": name for name in METHODS}
            named |= {
                shown: lambda name=name, model=model: scaled(model, name, options.extend)
                for shown, name in methods.items()
            }
        for shown, make in named.items():
            shares = [accuracy(make(), tokenizer, part, options.batch_size) for part in rows]
            print(f"{shown:{width}}" + "".join(f"{share:8.2f}" for share in shares), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
