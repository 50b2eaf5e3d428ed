"""An interpolated modified Kneser-Ney model on the very tokens of a recipe: what a pretraining has to beat.

    python benchmarks/kneser_ney.py pretrain-code                  # a recipe, overrides behind it
    python benchmarks/kneser_ney.py runs/pretrain-code             # a run: its recipe, and its figures beside

Chen and Goodman 1998 (TR-10-98), section 3: three discounts an order from counts of counts, lower orders on the
number of different tokens before an n-gram, the lowest interpolated with the uniform distribution. It learns from the
tokens of the recipe's training rows and is measured on the tokens that the recipe's held-out figure is of.

An end token closes each document and is predicted like any other. Before a document's first token stand as many
boundary marks as the model looks back, so no n-gram reaches into another document. A recipe's blocks leave their first
token out of the measure; it is left out here too, but the tokens behind it are predicted from all that stands before
them, also in the block before. Tokens on bytes leave nothing unknown, so no mass is kept for the unknown.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anyformer.recipes.errors import UserError

Array = np.ndarray[Any, Any]
# Where an order has no n-gram with a count of 1, 2, 3 or 4 there is no estimate; KenLM falls back on these as well.
FALLBACK = (0.5, 1.0, 1.5)


def discounts(counts: Array) -> tuple[float, float, float]:
    """The discounts of counts 1, 2, and 3 or more (equation 26), from how many n-grams have counts 1 to 4."""
    n1, n2, n3, n4 = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    if not min(n1, n2, n3, n4):
        return FALLBACK
    y = n1 / (n1 + 2 * n2)
    found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    # Below 0 a discount would add to a count, and above the count leave a negative one.
    usable = all(0 <= discount <= count for count, discount in enumerate(found, 1))
    return found if usable else FALLBACK


@dataclass
class _Order:
    """The n-grams of one length that were read, and of each what the next order needs.

    Attributes:
        keys: ascending, `number of the n-gram without its last token * symbols + last token`; an n-gram's number is
            its place here. N-grams that end in a boundary mark are here too, since they are contexts.
        mass: (count - discount) / count of the context; 0 where the n-gram only stands as a context.
        rest: of each context, a number of an (n-1)-gram, the share that goes to the lower order; 1 where nothing
            followed it.
    """

    keys: Array
    mass: Array
    rest: Array


class KneserNey:
    """Probabilities of the next token, given up to `order - 1` tokens before it.

    Attributes:
        discounts: of each order, the lowest first.
    """

    def __init__(self, documents: Sequence[Array], vocabulary: int, order: int = 5) -> None:
        """
        Args:
            documents: token ids, each [length], below `vocabulary`.
            order: tokens of the longest n-gram.
        """
        self.vocabulary, self.order, self.symbols = vocabulary, order, vocabulary + 1
        stream = self._stream(documents)
        predicted = stream != vocabulary
        numbers, places, keys = np.zeros(len(stream), dtype=np.int64), [], []
        for length in range(1, order + 1):
            before = np.concatenate([[0], numbers[:-1]]) if length > 1 else numbers
            # An n-gram that the beginning cuts short ends in a boundary mark, is no context and counts nothing.
            found, first, numbers = np.unique(before * self.symbols + stream, return_index=True, return_inverse=True)
            keys.append(found)
            places.append((first, numbers))
        self._orders: list[_Order] = []
        self.discounts: list[tuple[float, float, float]] = []
        counts = np.bincount(places[-1][1][predicted], minlength=len(keys[-1]))
        tables = [counts]
        for length in range(order - 1, 0, -1):
            # How many different tokens stand before an n-gram: the longer n-grams that end in it.
            longer, seen = places[length][0], tables[-1] > 0
            ends = places[length - 1][1][longer[seen]]
            tables.append(np.bincount(ends, minlength=len(keys[length - 1])))
        for length, counts in enumerate(reversed(tables), 1):
            contexts = len(keys[length - 2]) if length > 1 else 1
            self._add(keys[length - 1], counts, contexts)

    def _stream(self, documents: Sequence[Array]) -> Array:
        marks = np.full(max(self.order - 1, 1), self.vocabulary, dtype=np.int64)
        parts = (part for document in documents for part in (marks, document))
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])

    def _add(self, keys: Array, counts: Array, contexts: int) -> None:
        owners = keys // self.symbols
        discount = (0.0, *discounts(counts))
        taken = np.array(discount)[np.minimum(counts, 3)]
        total = np.bincount(owners, weights=counts, minlength=contexts)
        lost = np.bincount(owners, weights=taken, minlength=contexts)
        followed = total > 0
        rest = np.divide(lost, total, out=np.ones(contexts), where=followed)
        mass = np.divide(counts - taken, total[owners], out=np.zeros(len(keys)), where=followed[owners])
        self._orders.append(_Order(keys, mass, rest))
        self.discounts.append(discount[1:])  # type: ignore[arg-type]

    def probabilities(self, windows: Array) -> Array:
        """Of the last token of each window, given the tokens before it.

        Args:
            windows: [count, order], boundary marks (the number `vocabulary`) where a document has not begun.

        Returns:
            [count], float64.
        """
        found = np.full(len(windows), 1 / self.vocabulary)
        for length in range(1, self.order + 1):
            context = np.zeros(len(windows), dtype=np.int64)
            for place in range(1, length):
                context = self._number(place, context, windows[:, self.order - length + place - 1])
            known = context >= 0
            gram = self._number(length, context, windows[:, -1])
            order = self._orders[length - 1]
            rest = np.where(known, order.rest[context], 1.0)
            found = np.where(gram >= 0, order.mass[gram], 0.0) + rest * found
        return found

    def _number(self, length: int, context: Array, token: Array) -> Array:
        """The numbers of n-grams, -1 for those that were never read."""
        keys, wanted = self._orders[length - 1].keys, context * self.symbols + token
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where((context >= 0) & (keys[place] == wanted), place, -1)

    def document_probabilities(self, documents: Sequence[Array]) -> Array:
        """Of every token of the documents, one after another: [tokens], float64."""
        stream = self._stream(documents)
        windows = np.lib.stride_tricks.sliding_window_view(
            np.concatenate([np.full(self.order, self.vocabulary), stream]), self.order
        )[1:]
        return self.probabilities(windows[stream != self.vocabulary])


# The tokens of a recipe


@dataclass
class Side:
    """Training or held-out tokens.

    Attributes:
        documents: each with its end token.
        measured: [tokens], of the documents one after another, what the recipe's loss is taken over.
    """

    documents: list[Array]
    measured: Array

    @property
    def tokens(self) -> Array:
        return np.concatenate(self.documents)


def side(rows: Any, end: int) -> Side:
    """The documents of a recipe's rows.

    Args:
        rows: of a `pretrain` recipe with `packing: blocks`, in their order.
        end: the token that closes a document.
    """
    ids, measured = [], []
    for index in range(len(rows)):
        row = rows[index]
        ids.append(np.asarray(row["input_ids"], dtype=np.int64))
        measured.append(np.asarray(row["labels"]) >= 0)
    stream = np.concatenate(ids)
    bounds = np.flatnonzero(stream == end) + 1
    return Side([part for part in np.split(stream, bounds) if len(part)], np.concatenate(measured))


def bytes_of_tokens(tokenizer: Any) -> Array:
    """How many bytes of text each token of a tokenizer on bytes stands for, 0 for special ones: [vocabulary]."""
    from anyformer.recipes.tokens.byte_level import alphabet

    letters, special = set(alphabet()), set(tokenizer.all_special_ids)
    texts = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    odd = [text for index, text in enumerate(texts) if index not in special and not set(text) <= letters]
    if odd:
        raise SystemExit(f"bits a byte need a tokenizer on bytes; this one has {odd[0]!r}")
    return np.array([0 if index in special else len(text) for index, text in enumerate(texts)])


def prepared(recipe: str, overrides: Sequence[str]) -> tuple[Side, Side, Any]:
    """Training and held-out tokens of a recipe, as its run would see them, and the tokenizer."""
    from anyformer.recipes.loading import load_recipe
    from anyformer.recipes.prepare import prepare

    read = load_recipe(recipe, overrides)
    if read.objective.kind != "pretrain" or read.objective.packing != "blocks":
        raise SystemExit("the recipe must be of objective pretrain with packing: blocks, whose rows keep the order")
    plan = prepare(read)
    if plan.held_out is None:
        raise SystemExit("the recipe holds nothing out")
    end = plan.tokenizer.eos_token_id
    return side(plan.train.dataset, end), side(plan.held_out.dataset, end), plan.tokenizer


def figures(nats: float, text_bytes: float) -> str:
    """Perplexity a token and bits a byte.

    Args:
        nats: a token.
        text_bytes: a token.
    """
    bits = nats / math.log(2) / text_bytes
    return f"{nats:.4f} nats a token, perplexity {math.exp(nats):.2f}, {bits:.4f} bits a byte"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="a recipe, or the folder of a run")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, as of anyformer train")
    parser.add_argument("--order", type=int, default=5)
    options = parser.parse_args()
    run = Path(options.recipe) if (Path(options.recipe) / "metrics.json").is_file() else None
    try:
        train, held, tokenizer = prepared(str(run / "recipe.yaml") if run else options.recipe, options.overrides)
    except UserError as error:
        parser.error(str(error))
    sizes = bytes_of_tokens(tokenizer)[held.tokens[held.measured]]
    started = time.perf_counter()
    model = KneserNey(train.documents, len(tokenizer), options.order)
    learned = time.perf_counter() - started
    found = model.document_probabilities(held.documents)[held.measured]
    seconds = time.perf_counter() - started
    print(f"{len(train.documents):,} documents, {len(train.tokens):,} tokens to learn from ({learned:.1f} s);")
    print(f"{len(held.documents):,} held out, {len(found):,} tokens of {sizes.sum():,} bytes ({seconds:.1f} s in all).")
    for order, values in enumerate(model.discounts, 1):
        print(f"order {order}: discounts {', '.join(f'{value:.4f}' for value in values)}")
    print(f"{options.order}-gram: {figures(float(-np.log(found).mean()), float(sizes.mean()))}")
    if run:
        metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
        print(f"{run}: {figures(metrics['after']['loss'], float(sizes.mean()))}")


if __name__ == "__main__":
    main()
