"""Objective `pretrain`: how texts become rows, what the loss is, and runs from recipe to result."""

import json
from functools import partial

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from tuning import assert_equal_weights

from anyformer.recipes.arguments import training_arguments
from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.objectives.trainers import library_trainer
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.padding import pad_rows
from anyformer.recipes.tokens.plain_text import tokenize_documents

EOS = 2
ARGUMENTS = ("transformers.training_args", "TrainingArguments")


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


def rows_of(*texts):
    return [{"text": text} for text in texts]


def prepared(tokenizer, texts, **options):
    data = tokenize_documents(rows_of(*texts), tokenizer, **options)
    return [dict(row) for row in data.dataset], data.report


# Texts -> rows


def test_blocks_are_the_texts_with_their_end_tokens_cut_every_n_tokens(tokenizer):
    texts = ["one two three", "the cat sat", "five four"]
    stream = [token for text in texts for token in [*tokenizer(text)["input_ids"], EOS]]
    rows, report = prepared(tokenizer, texts, max_length=7, packing="blocks")
    assert [row["input_ids"] for row in rows] == [stream[i : i + 7] for i in range(0, len(stream), 7)]
    assert len(stream) % 7 and report.tokens == len(stream)  # the last, shorter block is kept
    assert report.rows == 3 and report.rows_kept == len(rows) and not report.dropped
    # Nothing but the first token of each block is unpredicted: texts go on into one another.
    assert all(row["labels"] == [-100, *row["input_ids"][1:]] for row in rows)
    assert report.supervised_tokens == len(stream) - len(rows)


def test_a_text_that_ends_with_the_end_token_gets_no_second_one(tokenizer):
    rows, _ = prepared(tokenizer, [f"one{tokenizer.eos_token}"], max_length=50, packing="none")
    assert rows[0]["input_ids"] == [*tokenizer("one")["input_ids"], EOS]


def test_a_last_block_of_one_token_is_left_out_and_counted(tokenizer):
    size = len(tokenizer("one two")["input_ids"])  # the end token is alone in the second block
    rows, report = prepared(tokenizer, ["one two"], max_length=size, packing="blocks")
    assert len(rows) == 1 and report.dropped == {"nothing to predict": 1}


def test_documents_are_whole_and_positions_start_again(tokenizer):
    texts = ["one two three", "the cat sat on the mat, the dog sat on the log", "five", "four"]
    whole = [[*tokenizer(text)["input_ids"], EOS] for text in texts]
    size = len(whole[0]) + 5
    rows, report = prepared(tokenizer, texts, max_length=size, packing="documents")
    expected = []  # a text longer than a row comes in parts of a row's length
    for ids in whole:
        expected += [ids[i : i + size] for i in range(0, len(ids), size)]
    found = []
    for row in rows:
        assert len(row["input_ids"]) <= size
        starts = [i for i, position in enumerate(row["position_ids"]) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
            assert row["position_ids"][start:end] == list(range(end - start))
            assert row["labels"][start:end] == [-100, *row["input_ids"][start + 1 : end]]
            found.append(row["input_ids"][start:end])
    assert sorted(found) == sorted(expected)
    assert len(rows) < len(expected) and report.rows_kept == len(rows)
    assert report.tokens == sum(map(len, whole))


@pytest.mark.parametrize(("truncation", "kept"), [("drop", 1), ("keep_start", 2)])
def test_without_packing_a_longer_text_is_left_out_or_cut(tokenizer, truncation, kept):
    texts = ["one two", "the cat sat on the mat, the dog sat on the log"]
    short = [*tokenizer(texts[0])["input_ids"], EOS]
    rows, report = prepared(tokenizer, texts, max_length=len(short), packing="none", truncation=truncation)
    assert rows[0]["input_ids"] == short and len(rows) == kept
    assert report.dropped == ({"longer than max_length": 1} if kept == 1 else {})
    assert report.truncated == kept - 1 == report.rows_kept - report.stopped


def test_nothing_left_names_count_cause_and_setting(tokenizer):
    with pytest.raises(UserError, match=r"None of the 2 texts.*2 longer than max_length. objective.max_length is 2"):
        tokenize_documents(rows_of("one two", "three four"), tokenizer, max_length=2, packing="none")


# The loss


def test_a_padded_batch_of_packed_rows_is_its_documents_one_by_one(tiny, tokenizer):
    """Each document's loss as the model computes it for that document alone, whatever stands around it."""
    model = tiny(vocab_size=len(tokenizer))
    texts = ["one two three", "the cat sat", "five four", "on", "the log, the mat"]
    rows, report = prepared(tokenizer, texts, max_length=16, packing="documents")
    assert 1 < len(rows) < len(texts) and len({len(row["input_ids"]) for row in rows}) > 1  # packed, and padded
    batch = pad_rows(rows, tokenizer.pad_token_id)
    assert batch["attention_mask"].min() == 0
    total = 0.0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], EOS]])
        logits = model(ids).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    torch.testing.assert_close(model(**batch).loss, total / report.supervised_tokens, rtol=0, atol=1e-5)


def trainer_for(model, rows, tokenizer, folder, **train):
    train = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "save_strategy": "no"} | train
    return library_trainer(
        Trainer,
        model,
        training_arguments(ARGUMENTS, train),
        adapter=None,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=None,
        data_collator=partial(pad_rows, pad_token_id=tokenizer.pad_token_id),
    )


@pytest.mark.parametrize("experts", [0, 4])
def test_the_gradient_of_n_times_1_is_that_of_1_times_n(tiny, tokenizer, tmp_path, experts):
    """One step of plain SGD over rows of unlike length moves the weights alike, however the batch is cut."""
    texts = ["one two three", "the", "the cat sat on the mat, the dog sat", "five four"]
    rows, _ = prepared(tokenizer, texts, max_length=64, packing="none")
    moved = []
    for batch, accumulation in ((4, 1), (1, 4), (2, 2)):
        # Of router losses only the z-loss is a mean over tokens: balance is one of the whole call.
        model = tiny(vocab_size=len(tokenizer), num_experts=experts, router_z_loss_coef=0.0).train()
        before = [p.detach().clone() for p in model.parameters()]
        settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": 1}
        settings |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer_for(model, rows, tokenizer, tmp_path, **settings).train()
        moved.append([(p - b).detach() for p, b in zip(model.parameters(), before, strict=True)])
    assert max(step.abs().max() for step in moved[0]) > 1e-3
    for other in moved[1:]:
        for one, two in zip(moved[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_the_trainers_loss_holds_the_router_losses(tiny, tokenizer, tmp_path):
    rows, _ = prepared(tokenizer, ["one two three", "the cat sat"], max_length=64, packing="none")
    model = tiny(vocab_size=len(tokenizer), num_experts=4, router_aux_loss_coef=0.5)
    trainer = trainer_for(model, rows, tokenizer, tmp_path, max_steps=1)
    batch = pad_rows(rows, tokenizer.pad_token_id)
    outputs = model(**batch)
    logits, labels = outputs.logits[:, :-1], batch["labels"][:, 1:]
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert outputs.aux_loss > 0.5
    torch.testing.assert_close(trainer.compute_loss(model, batch), plain + 0.5 * outputs.aux_loss, rtol=0, atol=1e-5)


def test_choosing_biases_move_by_their_rate_at_each_step(tiny, tokenizer, tmp_path):
    rows, _ = prepared(tokenizer, ["one two three", "the cat sat"], max_length=64, packing="none")
    fields = {"num_experts": 4, "router": "sigmoid", "router_score_bias": True, "router_bias_update_rate": 0.25}
    model = tiny(vocab_size=len(tokenizer), **fields).train()
    trainer_for(model, rows, tokenizer, tmp_path, max_steps=3, gradient_accumulation_steps=2).train()
    for layer in model.model.layers:
        bias = layer.mlp.router.e_score_correction_bias
        assert 0 < bias.abs().max() <= 0.75  # one step of the rate for each update, not for each batch
        torch.testing.assert_close(bias / 0.25, (bias / 0.25).round())
        assert (layer.mlp.router.load == 0).all()


# Runs

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint):
    """A function: a recipe with overrides, for texts that count."""
    lines = [json.dumps({"text": " ".join(WORDS[i % 7 :] * 2 + [str(i)])}) for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(
        "hidden_size: 32\nnum_hidden_layers: 2\nnum_attention_heads: 4\nmax_position_embeddings: 64\n", encoding="utf-8"
    )
    path = tmp_path / "recipe.yaml"
    text = f"""
model: {{preset: {tmp_path / "tiny.yaml"}, tokenizer: {tiny_checkpoint}}}
data: {{source: {tmp_path / "rows.jsonl"}, eval_fraction: 0.2}}
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
    [
        (),
        ("objective.packing=documents", "train.eval_strategy=steps", "train.eval_steps=10"),
        ("objective.packing=none", "objective.max_length=64", "data.truncation=keep_start"),
        ("model={path: CHECKPOINT}", "adapter={kind: lora}", "train.gradient_checkpointing=true"),
    ],
    ids=["blocks", "documents", "none", "lora"],
)
def test_a_run_is_better_on_held_out_texts(recipe, overrides, tiny_checkpoint, capsys):
    overrides = [override.replace("CHECKPOINT", str(tiny_checkpoint)) for override in overrides]
    folder = run_recipe(recipe(*overrides))
    metrics = metrics_of(folder)
    assert metrics["finished"] and metrics["measured"]["shown"] == ["loss", "perplexity"]
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 0.3
    assert metrics["after"]["tokens"] == metrics["before"]["tokens"] > 0
    assert len(metrics["samples_after"]) == 2 and metrics["samples_after"][0]["prompt"].split()[0] in WORDS
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "AnyformerForCausalLM"
    assert load_recipe(folder / "recipe.yaml") == recipe(*overrides)
    cut = "data.truncation=keep_start" in overrides
    assert ("does not learn to stop" in capsys.readouterr().out) == cut


def test_the_held_out_loss_is_that_of_the_model_on_each_row(recipe, tiny_checkpoint):
    """The measure against the model's own loss, row by row, weighted by targets; the batch size changes nothing."""
    from anyformer.recipes.prepare import prepare

    folder = run_recipe(recipe("objective.packing=documents", "train.max_steps=2"))
    ready = prepare(recipe("objective.packing=documents"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = count = 0
    for row in ready.held_out.dataset:
        batch = {name: torch.tensor([values]) for name, values in row.items()}
        targets = int((batch["labels"] != -100).sum())
        total, count = total + model(**batch).loss.item() * targets, count + targets
    assert metrics_of(folder)["after"]["tokens"] == count
    assert metrics_of(folder)["after"]["loss"] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("packing", ["blocks", "documents"])
def test_resume_is_bit_equal(recipe, tmp_path, interrupted, packing):
    common = (
        f"objective.packing={packing}",
        "objective.max_length=32",
        "model.config={attention_dropout: 0.1, hidden_dropout: 0.1}",
        "train.max_steps=24",
        "train.save_steps=17",
        "eval.samples=0",
    )
    whole = run_recipe(recipe(*common, f"train.output_dir={tmp_path / 'whole'}"))
    halted = recipe(*common, f"train.output_dir={tmp_path / 'halted'}")

    with interrupted():
        run_recipe(halted)
    resumed = run_recipe(halted, resume=True)
    assert_equal_weights(whole, resumed)


def test_the_checks_of_a_run_see_documents_and_accumulation(recipe):
    longer = ("model.config={max_position_embeddings: 192}", "objective.max_length=192")  # rows of several texts
    overrides = ("objective.packing=documents", "train.max_steps=3", *longer)
    checks = metrics_of(run_recipe(recipe(*overrides), check=True))["checks"]
    assert set(checks.values()) == {"passed"} and len(checks) == 2


def test_a_block_beyond_the_models_positions_is_refused(recipe):
    with pytest.raises(UserError, match=r"objective.max_length is 65, but the model has positions for 64"):
        run_recipe(recipe("objective.max_length=65"))
