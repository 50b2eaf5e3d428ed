"""Objective `classify`: the loss by hand, classes and their names, and short runs that learn."""

import pytest
import torch
import transformers
from kept import check_kept_rows
from labelled import SHAPES, built, first_batch, metrics_of, write_recipe
from torch.nn import functional as F

from anyformer.recipes.conversion import export_checkpoint
from anyformer.recipes.errors import UserError
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer

ANIMALS, FRUITS = ["cat", "dog", "cow", "hen"], ["fig", "kiwi", "plum", "pear"]
ROWS = [
    {"text": f"{'a' * (i % 5)} {word} {'z' * (i % 7)}", "label": label}
    for i in range(10)
    for words, label in ((ANIMALS, "animal"), (FRUITS, "fruit"))
    for word in words
] + [{"text": f"{letter} stone", "label": "stone"} for letter in "abcdefghij"]


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path, "classify", ROWS)


# Loss


@pytest.mark.parametrize("smoothing", [0, 0.2])
def test_the_loss_is_the_cross_entropy_of_the_classes(recipe, smoothing):
    _, model, trainer = built(recipe(f"train.label_smoothing_factor={smoothing}"))
    batch, count = first_batch(trainer)
    assert count == 8
    model.eval()
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = F.cross_entropy(logits, batch["labels"], label_smoothing=smoothing)
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=count)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)


def test_several_labels_have_a_binary_cross_entropy_each(tmp_path):
    rows = [{"text": row["text"], "label": [row["label"], "all"] if i % 3 else []} for i, row in enumerate(ROWS)]
    recipe = write_recipe(tmp_path, "classify", rows)
    prepared, model, trainer = built(recipe("objective.problem=multi-label"))
    assert prepared.config.problem_type == "multi_label_classification"
    assert list(prepared.config.label2id) == ["all", "animal", "fruit", "stone"]
    batch, count = first_batch(trainer)
    assert batch["labels"].shape == (8, 4) and count == 32
    model.eval()
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = F.binary_cross_entropy_with_logits(logits, batch["labels"])
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=count)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)


def test_figures_by_hand(recipe):
    prepared = prepare(recipe())
    objective = prepared.objective
    logits = torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 0, 2], [2, 0, 0]])  # animal, fruit, stone, animal
    objective.logits_of = lambda model, rows: (list(logits), [{"labels": label} for label in (0, 1, 0, 0)])
    figures = objective.measure(None, [], prepared.held_out)
    assert objective.held_rows.figures() == pytest.approx({name: figures[name] for name in objective.shown})
    assert figures["accuracy"] == pytest.approx(3 / 4)
    assert figures["macro_f1"] == pytest.approx((4 / 5 + 1 + 0) / 3)
    right, wrong = F.log_softmax(torch.tensor([2.0, 0, 0]), -1)[:2].tolist()
    assert figures["loss"] == pytest.approx(-(3 * right + wrong) / 4)


def test_what_is_measured_does_not_depend_on_padding(recipe):
    prepared, model, _ = built(recipe())
    one, many = (
        prepared.objective.measure(model, prepared.splits.eval, prepared.held_out)
        for prepared.objective.recipe.eval.batch_size in (1, 16)
    )
    assert one == pytest.approx(many, abs=1e-6)
    share = sum(row["label"] == prepared.objective.majority for row in prepared.splits.eval) / one["rows"]
    assert one["majority_share"] == pytest.approx(share)


# Classes


def test_classes_are_the_training_labels_sorted(recipe):
    config = prepare(recipe()).config
    assert config.id2label == {0: "animal", 1: "fruit", 2: "stone"}
    assert config.label2id == {"animal": 0, "fruit": 1, "stone": 2} and config.num_labels == 3


def test_classes_in_the_order_of_the_recipe(recipe):
    config = prepare(recipe("objective.labels=[stone, other, fruit, animal]")).config
    assert config.id2label == {0: "stone", 1: "other", 2: "fruit", 3: "animal"}
    with pytest.raises(UserError, match=r"objective\.labels: the training rows have 'animal' too"):
        prepare(recipe("objective.labels=[stone, fruit]"))


def test_numbers_are_classes_with_the_names_of_the_recipe(tmp_path):
    rows = [{"text": f"{i}", "label": (2, 10, 3)[i % 3]} for i in range(30)]
    recipe = write_recipe(tmp_path, "classify", rows)
    assert prepare(recipe()).config.id2label == {0: "2", 1: "3", 2: "10"}
    names = [f"n{i}" for i in range(11)]
    prepared = prepare(recipe(f"objective.labels={names}"))
    assert prepared.config.id2label[10] == "n10" and set(prepared.train.dataset["labels"]) == {2, 3, 10}
    with pytest.raises(UserError, match="the data have the class 3, but only 3 names are given"):
        prepare(recipe("objective.labels=[a, b, c]"))


def test_a_held_out_label_that_training_does_not_have(tmp_path):
    recipe = write_recipe(tmp_path, "classify", ROWS[:80])
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"text": "moss", "label": "plant"}\n{"text": "a cat", "label": "animal"}\n')
    own = ("~data.eval_fraction", f"data.eval_source={held_out}")
    with pytest.raises(UserError, match="the held-out rows have 'plant', which no training row has"):
        prepare(recipe(*own))
    assert prepare(recipe(*own, "objective.labels=[animal, fruit, plant]")).config.num_labels == 3


@pytest.mark.parametrize(
    ("label", "problem", "message"),
    [
        ("same", "single-label", "all training rows have the label 'same': there is nothing to tell apart"),
        (["a"], "single-label", "the label of a row is a list: set it to multi-label"),
        (0.5, "single-label", r"the label 0\.5 is no class.*set it to regression"),
        (-1, "single-label", r"the label -1 is no class"),
        ("a", "multi-label", "multi-label takes rows whose label is a list"),
        ([], "multi-label", "all training rows are without a label"),
        ("warm", "regression", "regression takes rows whose label is a number"),
        ("1_000", "regression", "regression takes rows whose label is a number"),
    ],
)
def test_labels_that_do_not_fit_the_problem(tmp_path, label, problem, message):
    recipe = write_recipe(tmp_path, "classify", [{"text": f"{i}", "label": label} for i in range(8)])
    with pytest.raises(UserError, match=message):
        prepare(recipe(f"objective.problem={problem}"))


def test_a_classifier_keeps_its_own_classes_or_is_refused(recipe, tmp_path):
    folder = run_recipe(recipe("objective.labels=[stone, fruit, animal]", "train.max_steps=2", "eval.samples=0"))
    again = ("~model.preset", f"model.path={folder}", f"model.tokenizer={folder}", "model.verify_import=false")
    prepared, model, _ = built(recipe(*again, f"train.output_dir={tmp_path / 'again'}"))
    assert prepared.config.id2label == {0: "stone", 1: "fruit", 2: "animal"}
    assert model.score.weight.shape[0] == 3
    with pytest.raises(UserError, match=r"tells 3 classes apart .* the data have 4"):
        prepare(recipe(*again, "objective.labels=[stone, fruit, animal, plant]"))
    named = prepare(recipe(*again, "objective.labels=[animal, fruit, stone]")).config
    assert named.id2label == {0: "stone", 1: "fruit", 2: "animal"}  # names in another order rename no output
    other = [{"text": row["text"], "label": f"no {row['label']}"} for row in ROWS]
    with pytest.raises(UserError, match=r"has the classes 'stone', 'fruit', 'animal', the data 'no animal'"):
        prepare(write_recipe(tmp_path, "classify", other)(*again))


@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_a_stock_classifier_goes_on_and_is_exported_again(recipe, tmp_path, family):
    torch.manual_seed(0)
    names = {"id2label": {0: "stone", 1: "fruit", 2: "animal"}, "label2id": {"stone": 0, "fruit": 1, "animal": 2}}
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(**sizes, **names, num_hidden_layers=2, pad_token_id=0)
    stock = getattr(transformers, f"{family}ForSequenceClassification")
    stock(config).save_pretrained(tmp_path / "stock")
    byte_tokenizer().save_pretrained(tmp_path / "stock")
    base = ("~model.preset", f"model.path={tmp_path / 'stock'}", "model.tokenizer=null")
    # Names in another order rename no output.
    assert prepare(recipe(*base, "objective.labels=[animal, stone, fruit]")).config.id2label == names["id2label"]
    with pytest.raises(UserError, match=r"objective\.labels: names one class alone"):
        prepare(recipe(*base, "objective.labels=[stone]"))
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text("".join(f'{{"text": "{i}", "label": {i}.5}}\n' for i in range(8)), encoding="utf-8")
    with pytest.raises(UserError, match=r"tells 3 classes apart .* and gives no number"):
        prepare(recipe(*base, "objective.problem=regression", f"data.source={numbers}"))
    folder = run_recipe(recipe(*base))
    metrics = metrics_of(folder)
    assert max(metrics["import_check"].values()) <= 1e-5
    assert metrics["after"]["loss"] < metrics["before"]["loss"]
    list(export_checkpoint(str(folder), tmp_path / "exported"))
    answers = [
        transformers.pipeline("text-classification", model=str(where))(["a cow", "stone q"])
        for where in (folder, tmp_path / "exported")
    ]
    assert type(stock.from_pretrained(tmp_path / "exported")).__name__ == f"{family}ForSequenceClassification"
    for ours, theirs in zip(*answers, strict=True):
        assert ours["label"] == theirs["label"] and ours["score"] == pytest.approx(theirs["score"], abs=1e-5)


# Rows


def test_long_rows_are_cut_and_counted_and_keep_their_end(recipe, minilm_folder):
    prepared = prepare(recipe("objective.max_length=6", f"model.tokenizer={minilm_folder}"))
    report, rows = prepared.train.report, prepared.train.dataset["input_ids"]
    assert report.rows_kept == report.rows and report.longest > 6
    assert 0 < report.truncated <= sum(len(ids) == 6 for ids in rows)
    cls, sep = prepared.tokenizer.cls_token_id, prepared.tokenizer.sep_token_id
    assert all(len(ids) <= 6 and ids[0] == cls and ids[-1] == sep for ids in rows)


def test_a_limit_beyond_the_positions_is_refused(recipe):
    with pytest.raises(UserError, match=r"objective\.max_length is 129, but the model has positions for 128"):
        prepare(recipe("objective.max_length=129"))


# Runs


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_beats_the_majority_and_opens_as_a_pipeline(tmp_path, shape, capsys):
    recipe = write_recipe(tmp_path, "classify", ROWS, shape=shape)
    evaluating = ("train.eval_strategy=steps", "train.eval_steps=30", "train.max_steps=90")
    folder = run_recipe(recipe(*evaluating, "train.gradient_accumulation_steps=2"), check=True)
    metrics = metrics_of(folder)
    assert metrics["checks"]["accumulated gradients equal those of one batch"] == "passed"
    before, after = metrics["before"], metrics["after"]
    assert after["accuracy"] > max(before["accuracy"], after["majority_share"]) + 0.2
    assert after["loss"] < before["loss"] - 0.2
    assert metrics["measured"]["shown"][0] == "accuracy" and metrics["measured"]["higher_is_better"]
    seen = [entry for entry in metrics["history"] if "eval_loss" in entry]
    assert seen[-1]["eval_accuracy"] == pytest.approx(after["accuracy"])
    assert seen[-1]["eval_macro_f1"] == pytest.approx(after["macro_f1"])
    assert seen[-1]["eval_loss"] == pytest.approx(after["loss"], abs=1e-5)
    answers = transformers.pipeline("text-classification", model=str(folder))(["a cow z", "an old plum"])
    assert {answer["label"] for answer in answers} <= {"animal", "fruit", "stone"}
    assert metrics["samples_after"][0]["answer"].split(" (")[0] in ("animal", "fruit", "stone")
    output = capsys.readouterr().out
    assert "3: animal" in output and "held-out majority share" in output and "anyformer chat" not in output


def test_an_adapter_trains_the_new_layer_too(tmp_path, tiny_checkpoint):
    recipe = write_recipe(tmp_path, "classify", ROWS)
    base = ("~model.preset", f"model.path={tiny_checkpoint}", "model.tokenizer=null")
    lora = "adapter={kind: lora, r: 8, target_modules: all-linear}"
    folder = run_recipe(recipe(*base, lora, "train.max_steps=60", "train.activation_checkpointing=true"))
    metrics = metrics_of(folder)
    assert metrics["after"]["accuracy"] > metrics["after"]["majority_share"] + 0.2
    assert metrics["import_check"]["plain"] <= 1e-5
    from safetensors.torch import load_file

    assert any("score" in name for name in load_file(folder / "adapter" / "adapter_model.safetensors"))


def test_a_regression_beats_the_mean(tmp_path):
    values = {"animal": 1, "fruit": 4.5, "stone": -2}
    recipe = write_recipe(tmp_path, "classify", [{"text": r["text"], "label": values[r["label"]]} for r in ROWS])
    folder = run_recipe(recipe("objective.problem=regression", "train.max_steps=90"))
    metrics = metrics_of(folder)
    assert metrics["after"]["loss"] < metrics["after"]["loss_of_the_mean"] / 2
    assert metrics["after"]["mean_absolute_error"] < metrics["before"]["mean_absolute_error"]
    assert not metrics["measured"]["higher_is_better"]
    check_kept_rows(folder)
    float(metrics["samples_after"][0]["answer"])


def test_numbers_of_a_csv_file_are_values(tmp_path):
    recipe = write_recipe(tmp_path, "classify", [])
    table = tmp_path / "rows.csv"
    table.write_text("text,label\n" + "".join(f"t{i},{i / 2}\n" for i in range(8)))
    prepared = prepare(recipe(f"data.source={table}", "objective.problem=regression"))
    assert set(prepared.train.dataset["labels"]) <= {i / 2 for i in range(8)}


def test_a_run_of_several_labels(tmp_path):
    rows = [{"text": row["text"], "label": [row["label"]] + ["z"] * ("z" in row["text"])} for row in ROWS]
    recipe = write_recipe(tmp_path, "classify", rows)
    options = ("train.eval_strategy=steps", "train.eval_steps=60", "train.max_steps=60")
    folder = run_recipe(recipe("objective.problem=multi-label", *options), check=True)
    metrics = metrics_of(folder)
    assert metrics["checks"]["accumulated gradients equal those of one batch"] == "passed"
    assert metrics["after"]["micro_f1"] > max(metrics["before"]["micro_f1"], 0.6)
    assert metrics["history"][-2]["eval_micro_f1"] == pytest.approx(metrics["after"]["micro_f1"])
    check_kept_rows(folder)


def test_a_result_no_better_than_the_majority_is_said(recipe, capsys):
    run_recipe(recipe("train.max_steps=1", "train.learning_rate=1e-9", "eval.samples=0"))
    assert "does not beat the" in capsys.readouterr().out


def test_the_best_checkpoint_is_chosen_in_the_right_direction(recipe):
    strategy = ("train.eval_strategy=steps", "train.save_strategy=steps", "train.save_steps=10", "train.eval_steps=10")
    best = ("train.load_best_model_at_end=true", *strategy)
    assert prepare(recipe(*best, "train.metric_for_best_model=accuracy")).arguments.greater_is_better is True
    assert prepare(recipe(*best)).arguments.greater_is_better is False
    with pytest.raises(UserError, match="'f1' is not measured in training; known: loss, accuracy, macro_f1"):
        prepare(recipe(*best, "train.metric_for_best_model=f1"))


def test_smoothed_labels_of_experts_are_refused(recipe):
    experts = "model.config={num_experts: 4}"
    prepare(recipe(experts))
    with pytest.raises(UserError, match=r"train\.label_smoothing_factor: .*mixture of experts"):
        prepare(recipe(experts, "train.label_smoothing_factor=0.1"))
