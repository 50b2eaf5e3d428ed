"""The n-gram model that a pretraining is compared with."""

import importlib.util
import json
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from recipe_files import write

from anyformer.recipes.loading import load_recipe
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer

_FILE = Path(__file__).parents[2] / "benchmarks" / "kneser_ney.py"
_SPEC = importlib.util.spec_from_file_location("kneser_ney", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
kneser_ney = importlib.util.module_from_spec(_SPEC)
sys.modules["kneser_ney"] = kneser_ney  # dataclasses look their module up
_SPEC.loader.exec_module(kneser_ney)


def texts(count: int, vocabulary: int, seed: int) -> list[np.ndarray]:
    """Documents of tokens that follow one another unevenly, so that counts of 1 to 4 and above all occur."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(vocabulary, 0.15), size=(vocabulary, vocabulary))
    documents = []
    for _ in range(count):
        document = [0, 0]
        for _ in range(int(rng.integers(1, 40))):
            document.append(int(rng.choice(vocabulary, p=table[document[-2], document[-1]])))
        documents.append(np.array(document[2:]))
    return documents


class Direct:
    """Chen and Goodman's formulas as they stand on paper, one n-gram at a time."""

    def __init__(self, documents, vocabulary, order):
        self.vocabulary, self.order = vocabulary, order
        grams = [Counter() for _ in range(order + 1)]
        for document in documents:
            padded = [-1] * (order - 1) + document.tolist()
            for end in range(order - 1, len(padded)):
                grams[order][tuple(padded[end - order + 1 : end + 1])] += 1
        for length in range(order - 1, 0, -1):
            grams[length] = Counter(gram[1:] for gram in grams[length + 1])
        self.grams = grams
        self.discounts = [(0.0,) * 3, *(kneser_ney.discounts(np.array(list(table.values()))) for table in grams[1:])]
        self.followers = [defaultdict(list) for _ in grams]
        for length, table in enumerate(grams):
            for gram, count in table.items():
                self.followers[length][gram[:-1]].append(count)

    def __call__(self, context, token):
        if not context and not self.order:
            return 1 / self.vocabulary
        return self._at(len(context) + 1, tuple(context), token)

    def _at(self, length, context, token):
        lower = 1 / self.vocabulary if length == 1 else self._at(length - 1, context[1:], token)
        counts = self.followers[length].get(context)
        if not counts:
            return lower
        taken = lambda count: self.discounts[length][min(count, 3) - 1]  # noqa: E731
        count = self.grams[length].get((*context, token), 0)
        own = count - taken(count) if count else 0.0
        return own / sum(counts) + sum(map(taken, counts)) / sum(counts) * lower


def test_a_bigram_model_worked_out_by_hand():
    # Bigrams ^a ab ab ba bc: too few for counts of counts, so the discounts are 0.5, 1 and 1.5. Before a stand two
    # different tokens, before b and c one each: p(a) = (2 - 1) / 4 + 2 / 4 / 3 = 5 / 12, p(b) = p(c) = 7 / 24.
    model = kneser_ney.KneserNey([np.array([0, 1, 0, 1, 2])], vocabulary=3, order=2)
    assert model.discounts == [(0.5, 1.0, 1.5)] * 2
    windows = np.array([[context, token] for context in (0, 1) for token in (0, 1, 2)])
    after_a = [1 / 2 * 5 / 12, (2 - 1) / 2 + 1 / 2 * 7 / 24, 1 / 2 * 7 / 24]
    after_b = [0.5 / 2 + 1 / 2 * 5 / 12, 1 / 2 * 7 / 24, 0.5 / 2 + 1 / 2 * 7 / 24]
    assert model.probabilities(windows) == pytest.approx([*after_a, *after_b], abs=1e-12)
    # Nothing was read behind c: what is left is the lower order.
    assert model.probabilities(np.array([[2, 0], [2, 1]])) == pytest.approx([5 / 12, 7 / 24], abs=1e-12)


def test_discounts_of_counts_of_counts_worked_out_by_hand():
    # n1..n4 = 4, 3, 2, 1: Y = 4 / 10, 1 - 2 Y 3 / 4 = 0.4, 2 - 3 Y 2 / 3 = 1.2, 3 - 4 Y 1 / 2 = 2.2.
    assert kneser_ney.discounts(np.array([1] * 4 + [2] * 3 + [3] * 2 + [4, 9])) == pytest.approx((0.4, 1.2, 2.2))
    assert kneser_ney.discounts(np.array([1, 1, 2, 3])) == kneser_ney.FALLBACK
    # n2 of 1 and n3 of 10 would give 2 - 3 Y 10 < 0 for counts of 2.
    assert kneser_ney.discounts(np.array([1] * 10 + [2] + [3] * 10 + [4])) == kneser_ney.FALLBACK


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_it_is_the_formula_on_every_context(order):
    documents, vocabulary = texts(120, 12, seed=1), 12
    model, direct = kneser_ney.KneserNey(documents, vocabulary, order), Direct(documents, vocabulary, order)
    assert order == 1 or model.discounts[-1] != kneser_ney.FALLBACK
    assert [tuple(found) for found in model.discounts] == direct.discounts[1:]
    rng = np.random.default_rng(2)
    windows = rng.integers(0, vocabulary, size=(400, order))
    for row in windows[:100]:  # the beginnings of documents
        row[: rng.integers(0, order)] = vocabulary
    expected = [
        direct([-1 if token == vocabulary else token for token in row[:-1].tolist()], int(row[-1])) for row in windows
    ]
    assert model.probabilities(windows) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("order", [1, 3, 5])
def test_probabilities_sum_to_one_in_every_context(order):
    vocabulary = 12
    model = kneser_ney.KneserNey(texts(120, vocabulary, seed=3), vocabulary, order)
    contexts = np.random.default_rng(4).integers(0, vocabulary + 1, size=(300, order - 1))
    windows = np.concatenate([np.repeat(contexts, vocabulary, axis=0), np.tile(np.arange(vocabulary), 300)[:, None]], 1)
    sums = model.probabilities(windows).reshape(300, vocabulary).sum(axis=1)
    assert np.abs(sums - 1).max() < 1e-9


def test_documents_are_read_one_by_one():
    documents = texts(80, 9, seed=5)
    model = kneser_ney.KneserNey(documents, 9, 4)
    held = texts(6, 9, seed=6)
    together = model.document_probabilities(held)
    alone = np.concatenate([model.document_probabilities([document]) for document in held])
    assert np.array_equal(together, alone) and len(together) == sum(map(len, held))
    # By hand, one token at a time.
    document = held[0].tolist()
    for place in range(min(5, len(document))):
        window = [9] * max(0, 3 - place) + document[max(0, place - 3) : place + 1]
        assert model.probabilities(np.array([window]))[0] == together[place]


def test_the_documents_of_blocks_and_what_is_measured_of_them():
    stream, end = [5, 6, 1, 7, 8, 9, 1, 4], 1
    rows = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in (stream[:4], stream[4:])]
    side = kneser_ney.side(rows, end)
    assert [document.tolist() for document in side.documents] == [[5, 6, 1], [7, 8, 9, 1], [4]]
    assert side.measured.tolist() == [False, True, True, True, False, True, True, True]
    assert side.tokens.tolist() == stream


def test_bytes_of_tokens():
    tokenizer = byte_tokenizer()
    sizes = kneser_ney.bytes_of_tokens(tokenizer)
    text = "naïve 中"
    assert sizes[tokenizer(text)["input_ids"]].sum() == len(text.encode())
    assert sizes[: len(tokenizer) - 256].sum() == 0
    assert math.isclose(sizes[-256:].mean(), 1)


RECIPE = """
model:
  preset: mini-llama
  tokenizer: builtin:bpe:280
  config: {num_hidden_layers: 1, hidden_size: 64, num_attention_heads: 2}
data: {source: texts.jsonl, eval_fraction: 0.3}
objective: {kind: pretrain, max_length: 16}
train: {max_steps: 1, output_dir: run}
eval: {samples: 0}
"""


def test_both_models_are_measured_on_the_same_tokens(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"the number {n} follows {n - 1}, and {'é' * (n % 7)} follows both" for n in range(60)]
    write("".join(json.dumps({"text": row}) + "\n" for row in rows), "texts.jsonl")
    folder = run_recipe(load_recipe(write(RECIPE)))
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    train, held, tokenizer = kneser_ney.prepared(str(folder / "recipe.yaml"), [])
    texts = [tokenizer.decode(document[:-1]) for document in (*train.documents, *held.documents)]
    assert sorted(texts) == sorted(rows) and len(held.documents) == 18  # 0.3 of 60
    assert held.measured.sum() == metrics["after"]["tokens"]
    monkeypatch.setattr(sys, "argv", ["kneser_ney.py", str(folder), "--order", "3"])
    kneser_ney.main()
    said = capsys.readouterr().out
    model = kneser_ney.KneserNey(train.documents, len(tokenizer), 3)
    loss = -np.log(model.document_probabilities(held.documents)[held.measured]).mean()
    assert f"3-gram: {loss:.4f} nats a token, perplexity {math.exp(loss):.2f}" in said
    assert f"run: {metrics['after']['loss']:.4f} nats a token, perplexity {metrics['after']['perplexity']:.2f}" in said
