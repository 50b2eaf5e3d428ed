"""The pipeline `long-context`, small: a scaled model finds a key beyond the trained length, a plain one does not."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from anyformer.recipes.data.builtin import in_held_out_part
from anyformer.recipes.data.builtin.passkey import FILLER
from anyformer.recipes.run import run_recipe
from anyformer.recipes.stages import load_pipeline

_FILE = Path(__file__).parents[2] / "benchmarks" / "passkey.py"
_SPEC = importlib.util.spec_from_file_location("passkey", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
passkey = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(passkey)

ROWS = 50
SMALL = (
    "short.data.source={path: passkey, arguments: {rows: 9000, words: [47, 64]}}",
    "short.model.config.max_position_embeddings=80",
    "short.model.config.num_hidden_layers=2",
    "short.train.max_length=80",
    "short.train.max_steps=250",
    "short.train.learning_rate=1e-2",
    "short.train.warmup_steps=20",
    "yarn.data.source={path: passkey, arguments: {rows: 700, words: [47, 130]}}",
    "yarn.model.context_extension.length=160",
    "yarn.train.max_length=160",
    "yarn.train.max_steps=30",
    "eval={samples: 0, before: false}",
    "train.save_strategy=no",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_yarn_and_a_short_training_find_keys_beyond_the_trained_length(tmp_path):
    """About 60 s of one core, most of them for learning to copy; chance is 1 in 10,000."""
    pipeline = load_pipeline("long-context", [*SMALL, f"train.output_dir={tmp_path}"])
    found = {}
    for name in ("short", "yarn"):
        folder = run_recipe(pipeline.resolved(pipeline[name]))
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        for length in (80, 160):
            rows = passkey.rows_of_length(tokenizer, length, ROWS, digits=4, seed=1)
            found[name, length] = passkey.accuracy(model, tokenizer, rows, batch_size=25)
    assert found["short", 80] > 0.8, found
    assert found["short", 160] < 0.5, found
    assert found["yarn", 160] > found["short", 160] + 0.4, found
    assert found["yarn", 80] > 0.6, found


def test_rows_fill_the_length_and_their_keys_are_held_out(tiny_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    rows = passkey.rows_of_length(tokenizer, 600, 20, digits=4, seed=2)
    lengths = [len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) for row in rows]
    sentence = max(len(tokenizer(" " + text)["input_ids"]) for text in FILLER)
    assert max(lengths) <= 600 and min(lengths) > 600 - sentence - 5
    assert all(in_held_out_part(row["answer"], eval_fraction=0.1, seed=0) for row in rows)
    assert len({row["prompt"] for row in rows}) == 20


def test_an_answer_counts_where_all_its_digits_are_right(tiny, tiny_checkpoint, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = tiny(vocab_size=320, max_position_embeddings=512)
    rows = passkey.rows_of_length(tokenizer, 500, 3, digits=2, seed=3)
    assert passkey.accuracy(model, tokenizer, rows, 2) == 0.0
    texts = [row["completion"] for row in rows]
    texts[1] = texts[1].replace(rows[1]["answer"], rows[1]["answer"][:2] + "x")
    given = {row["prompt"]: tokenizer(text)["input_ids"] for row, text in zip(rows, texts, strict=True)}

    def answered(model, tokenizer, prompts, **options):
        return [given[tokenizer.decode(ids)] for ids in prompts]

    monkeypatch.setattr(passkey, "greedy_answers", answered)
    assert passkey.accuracy(model, tokenizer, rows, 2) == pytest.approx(2 / 3)


@pytest.mark.parametrize("method", passkey.METHODS)
def test_a_scaled_model_has_the_same_weights_and_other_frequencies(tiny, method):
    model = tiny(max_position_embeddings=32)
    other = passkey.scaled(model, method, 128)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    tokens = torch.randint(3, 101, (1, 100), generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(model(tokens).logits, other(tokens).logits, atol=1e-2)
    same = torch.allclose(model(tokens[:, :20]).logits, other(tokens[:, :20]).logits, atol=1e-4)
    # LongRoPE sharpens the scores of short texts, too, by its factor on cos and sin.
    assert same is (method == "dynamic")
