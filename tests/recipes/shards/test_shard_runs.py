"""`objective: pretrain` on token shards, from recipe to result."""

import io
import json

import pytest
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from tuning import assert_equal_weights

from anyformer.recipes.errors import UserError
from anyformer.recipes.inspection import inspect_recipe
from anyformer.recipes.inspection.page import render
from anyformer.recipes.inspection.terminal import show
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe
from anyformer.recipes.shards import TokenShards

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TEXTS = [" ".join(WORDS[i % 7 :] * 2 + [str(i)]) for i in range(60)]


@pytest.fixture
def recipe(tmp_path, shards_of, tiny_checkpoint):
    """A function: a recipe with overrides, for texts that count, in the folder `shards`."""
    shards_of(TEXTS)
    (tmp_path / "tiny.yaml").write_text(
        "hidden_size: 32\nnum_hidden_layers: 2\nnum_attention_heads: 4\nmax_position_embeddings: 64\n", encoding="utf-8"
    )
    path = tmp_path / "recipe.yaml"
    text = f"""
model: {{preset: {tmp_path / "tiny.yaml"}, tokenizer: {tmp_path / "shards" / "tokenizer"}}}
data: {{source: {tmp_path / "shards"}, eval_fraction: 0.2}}
objective: {{kind: pretrain, max_length: 48}}
train:
  output_dir: {tmp_path / "run"}
  max_steps: 20
  per_device_train_batch_size: 4
  learning_rate: 1e-2
  logging_steps: 5
  save_steps: 50
  seed: 7
eval: {{samples: 2, max_new_tokens: 5}}
"""
    path.write_text(text, encoding="utf-8")
    return lambda *overrides: load_recipe(path, overrides)


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "overrides",
    [(), ("objective.packing=documents",), ("objective.packing=none", "data.truncation=keep_start")],
    ids=["blocks", "documents", "none"],
)
def test_a_run_is_the_one_on_the_texts(recipe, tmp_path, texts_of, shards_of, overrides):
    """The same losses on the way, the same held-out loss and the same weights, to the last bit."""
    held = ["nine ten one two", "six seven eight nine three", "five six seven"]
    shards_of(held, "held")
    common = ("train.max_steps=12", "train.logging_steps=1", *overrides)
    sides = {}
    for name, source, other in (
        ("shards", tmp_path / "shards", tmp_path / "held"),
        ("texts", texts_of(TEXTS), texts_of(held, "held-texts.jsonl")),
    ):
        changed = (f"data={{source: {source}, eval_source: {other}}}", *common)
        sides[name] = run_recipe(recipe(*changed, f"train.output_dir={tmp_path / name}-run"))
    assert_equal_weights(sides["texts"], sides["shards"])
    one, two = (metrics_of(sides[name]) for name in ("texts", "shards"))
    assert one["before"] == two["before"] and one["after"] == two["after"]
    logged = [[entry.get("loss") for entry in metrics["history"]] for metrics in (one, two)]
    assert logged[0] == logged[1] and len(logged[0]) > 12
    assert {**one["plan"]} == {**two["plan"]}
    assert one["samples_after"] == two["samples_after"] and len(one["samples_after"]) == 2


def test_a_run_holds_documents_out_and_opens_again(recipe, tmp_path, capsys):
    folder = run_recipe(recipe("train.eval_strategy=steps", "train.eval_steps=10"), check=True)
    metrics, said = metrics_of(folder), capsys.readouterr().out
    assert metrics["finished"] and metrics["after"]["loss"] < metrics["before"]["loss"] - 0.3
    assert "token shards" in said and "whole documents, about 0.2 of them" in said and "⟦" in said
    assert f"Check: checksums of {tmp_path / 'shards'}: passed." in said
    assert metrics["samples_after"][0]["prompt"].split()[0] in WORDS
    assert metrics["data"]["format"] == "tokens" and metrics["data"]["sources"] == [str(tmp_path / "shards")]
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "AnyformerForCausalLM"
    assert "eval_loss" in metrics["history"][-2] or any("eval_loss" in entry for entry in metrics["history"])


def test_the_model_must_have_the_tokenizer_of_the_shards(recipe, tmp_path, tiny_checkpoint):
    other = AutoTokenizer.from_pretrained(tiny_checkpoint)
    other.add_tokens(["<new>"])
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError) as caught:
        prepare(recipe(f"model.tokenizer={tmp_path / 'other'}"))
    shards = TokenShards(tmp_path / "shards")
    size = shards.index.vocab_size
    assert f"{tmp_path / 'shards'} was made with a tokenizer of {size:,} tokens" in str(caught.value)
    assert f"that of the model, {tmp_path / 'other'}, has {size + 1:,}" in str(caught.value)
    assert shards.index.tokenizer[:12] in str(caught.value)
    assert f"set model.tokenizer to {tmp_path / 'shards' / 'tokenizer'}" in str(caught.value)
    prepare(recipe(f"model.tokenizer={tiny_checkpoint}"))  # the same one from elsewhere


def test_other_objectives_refuse_shards_before_anything_is_loaded(recipe, tiny_checkpoint):
    with pytest.raises(UserError, match="holds token shards, which the objective pretrain alone reads"):
        prepare(recipe("objective={kind: sft}", f"model={{path: {tiny_checkpoint}}}"))


def test_a_run_goes_on_to_the_same_weights_and_with_the_same_data_alone(recipe, tmp_path, interrupted, shards_of):
    common = ("objective.packing=documents", "objective.max_length=32", "train.save_steps=17", "eval.samples=0")
    common += ("model.config={attention_dropout: 0.1, hidden_dropout: 0.1}", "train.max_steps=24")
    whole = run_recipe(recipe(*common, f"train.output_dir={tmp_path / 'whole'}"))
    halted = recipe(*common, f"train.output_dir={tmp_path / 'halted'}")
    with interrupted():
        run_recipe(halted)
    shards_of([*TEXTS[:-1], "ten"], overwrite=True)
    with pytest.raises(UserError, match=r"the rows differ from those that .* was started with"):
        run_recipe(halted, resume=True)
    shards_of(TEXTS, overwrite=True, shard_tokens=70)  # cut otherwise, the same documents
    assert_equal_weights(whole, run_recipe(halted, resume=True))


def test_the_digest_of_a_run_is_that_of_its_documents(recipe):
    digests = [
        prepare(recipe(*overrides)).data_digest
        for overrides in ((), (), ("data.seed=1",), ("data.max_rows=9",), ("data.eval_fraction=0",))
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 4


def test_nothing_is_tokenised_again(recipe, monkeypatch):
    """Neither for the plan nor for the preview: rows are read from the shards."""
    import anyformer.recipes.tokens.plain_text as plain_text

    monkeypatch.setattr(plain_text, "tokenize_documents", None)
    ready = prepare(recipe())
    assert not isinstance(ready.train.dataset, Dataset)
    report = ready.train.report
    assert report.rows == ready.splits.report.rows_train and report.tokens > report.supervised_tokens > 0
    assert len(ready.objective.preview(ready.train, 3)) == 3


@pytest.mark.parametrize("packing", ["blocks", "documents", "none"])
def test_rows_of_shards_are_shown(recipe, packing):
    inspection = inspect_recipe(recipe(f"objective.packing={packing}"), "shards")
    stream = io.StringIO()
    show(Console(file=stream, width=100), inspection)
    assert "╎t╎e╎n╎·╎" in stream.getvalue() and "<|im_end|>" in stream.getvalue()
    page = render(inspection)
    assert page.count("<details") == len(inspection.shown) > 0
    json.dumps(inspection.as_dict(), allow_nan=False)
