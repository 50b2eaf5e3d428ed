"""Objective `seq2seq`, and `sft` of an encoder-decoder: labels and losses by hand, answers, and short runs."""

import random

import pytest
import torch
from labelled import built, first_batch, metrics_of, write_recipe
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration
from tuning import assert_equal_weights

from anyformer.recipes.errors import UserError
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer
from anyformer.recipes.tokens.padding import pad_rows
from anyformer.recipes.tokens.sequences import asked_text, encode_targets

EOS, BOS, PAD = 2, 1, 0


WORDS = {"uno": "one", "due": "two", "tre": "three"}


@pytest.fixture
def rows():
    """`due zz` -> `two`."""
    rng = random.Random(0)
    padding = ["".join(rng.choices("wxyz", k=rng.randint(1, 5))) for _ in range(50)]
    return [{"source": f"{word} {end}", "target": WORDS[word]} for end in padding for word in WORDS]


@pytest.fixture
def recipe(tmp_path, rows):
    return write_recipe(tmp_path, "seq2seq", rows, shape="encoder-decoder")


def text(ids):
    return bytes(i - 4 for i in ids if i > 3).decode()


# Rows


def test_targets_end_and_the_decoder_starts(recipe):
    prepared, model, _ = built(recipe())
    row = next(row for row in prepared.train.dataset if len(row["labels"]) == 6)
    assert row["labels"][-1] == EOS and text(row["labels"]) == WORDS[text(row["input_ids"]).split()[0]] == "three"
    assert prepared.config.decoder_start_token_id == BOS
    labels = torch.tensor([row["labels"], [*row["labels"][:3], EOS, -100, -100]])
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted.tolist() == [[BOS, *row["labels"][:-1]], [BOS, *row["labels"][:3], EOS, PAD]]


def test_a_start_token_that_the_tokenizer_writes_itself_is_not_learned(recipe):
    start = prepare(recipe()).objective.tokenizing().settings["start_token_id"]

    class Writes:
        eos_token_id = EOS

        def __init__(self, *ids):
            self.ids = ids

        def __call__(self, text_target):
            return {"input_ids": [list(self.ids) for _ in text_target]}

    for written, expected in (
        ((BOS, 50, EOS), [50, EOS]),  # as of BERT-like tokenizers
        ((50, EOS), [50, EOS]),  # T5's
        ((3, 50, EOS), [3, 50, EOS]),  # a first token that is not the start token, as BART has it
        ((50,), [50, EOS]),
    ):
        assert encode_targets(["x"], Writes(*written), start) == [expected]


@pytest.mark.parametrize(
    ("start", "overrides"),
    [(BOS, ()), (7, ("model.config.decoder_start_token_id=7",))],
    ids=["of the tokenizer", "of the recipe"],
)
def test_the_start_token(recipe, start, overrides):
    assert prepare(recipe(*overrides)).config.decoder_start_token_id == start


def test_long_rows_are_dropped_or_cut(recipe, tmp_path):
    data = tmp_path / "long.jsonl"
    lines = [("abcdefgh", "xy"), ("ab", "uvwxyz"), ("a", "b"), ("c", "d"), ("abcd", "vwxyz")]
    data.write_text("".join(f'{{"source": "{a}", "target": "{b}"}}\n' for a, b in lines))
    limits = ("objective.max_source_length=4", "objective.max_target_length=6")
    options = (f"data.source={data}", "data.eval_fraction=0", *limits)
    report = prepare(recipe(*options)).train.report
    assert report.rows_kept == report.stopped == 3 and report.truncated == 0 and report.longest == 8
    assert report.dropped == {
        "longer than objective.max_source_length (4)": 1,
        "longer than objective.max_target_length (6)": 1,
    }
    cut = prepare(recipe(*options, "data.truncation=keep_start")).train
    assert cut.report.rows_kept == 5 and cut.report.truncated == 2 and cut.report.stopped == 4
    assert text(cut.dataset[0]["input_ids"]) == "abcd"
    # What is cut does not end, and is not taught to.
    assert text(cut.dataset[1]["labels"]) == "uvwxyz" and EOS not in cut.dataset[1]["labels"]
    assert text(cut.dataset[4]["labels"]) == "vwxyz" and cut.dataset[4]["labels"][-1] == EOS
    with pytest.raises(UserError, match=r"None of the 5 rows is left .* 5 longer than objective\.max_target_length"):
        prepare(recipe(*options[:2], "objective.max_target_length=3")).objective.prepare(
            [{"source": "a", "target": "bcd"}] * 5
        )


def test_padding_comes_behind_on_both_sides():
    batch = pad_rows([{"input_ids": [5], "labels": [7, 8]}, {"input_ids": [5, 6], "labels": [7]}], 9)
    assert batch["input_ids"].tolist() == [[5, 9], [5, 6]] and batch["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["labels"].tolist() == [[7, 8], [7, -100]]


# Loss


@pytest.mark.parametrize("smoothing", [0, 0.1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_predicts_each_label_from_those_before_it(recipe, smoothing, side):
    prepared, model, trainer = built(recipe(f"train.label_smoothing_factor={smoothing}"))
    prepared.tokenizer.padding_side = side  # of no consequence
    batch, count = first_batch(trainer)
    on = batch["labels"] != -100
    assert count == on.sum() < on.numel()
    assert ("decoder_input_ids" in batch) == (smoothing > 0)
    model.eval()
    expected = 0.0
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        ids, labels = ids[mask.bool()][None], labels[labels != -100]
        given = torch.tensor([[BOS, *labels[:-1].tolist()]])
        logits = model(ids, decoder_input_ids=given).logits[0]
        expected += F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=count)
    torch.testing.assert_close(loss, expected / count, rtol=0, atol=1e-5)


def test_what_is_measured_is_the_plain_loss_row_by_row(recipe):
    prepared, model, _ = built(recipe("train.label_smoothing_factor=0.3"))
    figures = prepared.objective.measure(model, prepared.splits.eval, prepared.held_out)
    model.eval()
    total = count = 0
    for row in prepared.held_out.dataset:
        logits = model(
            torch.tensor([row["input_ids"]]), decoder_input_ids=torch.tensor([[BOS, *row["labels"][:-1]]])
        ).logits[0]
        total += F.cross_entropy(logits, torch.tensor(row["labels"]), reduction="sum").item()
        count += len(row["labels"])
    assert figures["tokens"] == count and figures["rows"] == len(prepared.held_out.dataset)
    assert figures["loss"] == pytest.approx(total / count, abs=1e-5)


# Answers


def test_answers_depend_on_no_padding(recipe):
    prepared, model, _ = built(recipe("model.config.initializer_range=0.4"))
    objective, rows = prepared.objective, [dict(row) for row in prepared.held_out.dataset][:12]
    assert len({len(row["input_ids"]) for row in rows}) > 1
    together = objective.answers(model, rows, 12)
    objective.recipe.eval.batch_size = 1
    assert objective.answers(model, rows, 12) == together and len(set(together)) > 1
    # And by hand, padded on the left.
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([[PAD] * (longest - len(row["input_ids"])) + row["input_ids"] for row in rows])
    mask = torch.tensor([[0] * (longest - len(row["input_ids"])) + [1] * len(row["input_ids"]) for row in rows])
    model.eval()
    output = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert [objective._text(row) for row in output.tolist()] == together


def test_figures_of_answers(recipe):
    prepared, model, _ = built(recipe())
    objective = prepared.objective
    references = [objective._text(row["labels"]) for row in prepared.held_out.dataset]
    objective.answers = lambda model, rows, limit: [reference[:-1] for reference in references]
    figures = objective.measure(model, prepared.splits.eval, prepared.held_out)
    assert objective.held_rows.figures() == pytest.approx({name: figures[name] for name in objective.shown})
    assert figures["exact_match"] == 0 and figures["word_error_rate"] == 1
    assert figures["character_error_rate"] == pytest.approx(len(references) / sum(map(len, references)))
    objective.answers = lambda model, rows, limit: references
    figures = objective.measure(model, prepared.splits.eval, prepared.held_out)
    assert (figures["exact_match"], figures["character_error_rate"], figures["word_error_rate"]) == (1, 0, 0)


# Runs


@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_a_run_learns_and_its_evaluation_agrees(recipe, smoothing):
    evaluating = ("train.eval_strategy=steps", "train.eval_steps=60", "train.predict_with_generate=true")
    run = ("train.max_steps=60", f"train.label_smoothing_factor={smoothing}", "train.per_device_eval_batch_size=7")
    folder = run_recipe(recipe(*evaluating, *run, "model.config.hidden_dropout=0"), check=True)
    metrics = metrics_of(folder)
    assert metrics["checks"]["accumulated gradients equal those of one batch"] == "passed"
    before, after = metrics["before"], metrics["after"]
    assert after["loss"] < before["loss"] - 1 and after["exact_match"] > 0.6 > before["exact_match"]
    assert after["character_error_rate"] < 0.4
    seen = [entry for entry in metrics["history"] if "eval_loss" in entry][-1]
    for name in ("exact_match", "character_error_rate", "word_error_rate"):
        assert seen[f"eval_{name}"] == pytest.approx(after[name])
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "AnyformerForConditionalGeneration"
    assert model.generation_config.decoder_start_token_id == BOS and model.generation_config.eos_token_id == EOS
    sample = metrics["samples_after"][0]
    output = model.generate(**tokenizer(sample["prompt"], return_tensors="pt"), max_new_tokens=64)
    assert tokenizer.decode(output[0], skip_special_tokens=True) == sample["answer"]


def test_an_adapter_of_an_encoder_decoder(recipe, tmp_path):
    base = run_recipe(recipe("train.max_steps=40", "eval.samples=0", "train.learning_rate=5e-3"))
    again = ("~model.preset", f"model.path={base}", f"model.tokenizer={base}", "model.verify_import=false")
    lora = ("adapter={kind: lora, r: 8, target_modules: all-linear}", "train.activation_checkpointing=true")
    lora += ("train.learning_rate=3e-3", "model.config.hidden_dropout=0")
    metrics = metrics_of(run_recipe(recipe(*again, *lora, f"train.output_dir={tmp_path / 'adapted'}")))
    assert metrics["before"]["loss"] == pytest.approx(metrics_of(base)["after"]["loss"], abs=1e-4)
    assert metrics["after"]["loss"] < metrics["before"]["loss"]


def test_a_stock_checkpoint_goes_on_with_its_own_start_token(recipe, tmp_path):
    torch.manual_seed(0)
    config = T5Config(vocab_size=260, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=3)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    byte_tokenizer().save_pretrained(tmp_path / "t5")
    metrics = metrics_of(run_recipe(recipe("~model.preset", f"model.path={tmp_path / 't5'}", "model.tokenizer=null")))
    assert metrics["import_check"]["plain"] <= 1e-5
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 1
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    assert saved.config.decoder_start_token_id == saved.generation_config.decoder_start_token_id == 3


def test_resume_is_bit_equal(recipe, tmp_path, interrupted):
    """Stopped at step 7 of 12 with dropout on: the last weights are those of the undisturbed run."""
    common = ("train.max_steps=12", "train.save_strategy=steps", "train.save_steps=7", "eval.samples=0")
    whole = run_recipe(recipe(*common, f"train.output_dir={tmp_path / 'whole'}"))
    halted = recipe(*common, f"train.output_dir={tmp_path / 'halted'}")

    with interrupted():
        run_recipe(halted)
    resumed = run_recipe(halted, resume=True)
    assert_equal_weights(whole, resumed)


def test_experts_learn_with_their_router_losses_but_not_smoothed(recipe):
    fields = "num_experts: 4, router_aux_loss_coef: 0.1, router_score_bias: true, router_bias_update_rate: 0.25"
    experts = f"model.config={{{fields}}}"
    with pytest.raises(UserError, match=r"train\.label_smoothing_factor: .*mixture of experts"):
        prepare(recipe(experts, "train.label_smoothing_factor=0.1"))
    _, model, trainer = built(recipe(experts, "train.max_steps=1"))
    batch, count = first_batch(trainer)
    torch.manual_seed(0)
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=count)
    torch.manual_seed(0)
    torch.testing.assert_close(loss, model(**batch).loss, rtol=0, atol=1e-5)
    trainer.train()  # one step: a second may move a bias back
    for layer in [*model.model.layers, *model.model.encoder.layers]:
        assert layer.mlp.router.e_score_correction_bias.abs().max() > 0


def test_a_decoder_is_refused(tmp_path, rows):
    with pytest.raises(UserError, match=r"it has architecture decoder, which goes with .*Choose another"):
        prepare(write_recipe(tmp_path, "seq2seq", rows, shape="decoder")())


# Supervised tuning of an encoder-decoder


def sft(tmp_path, rows):
    return write_recipe(tmp_path, "sft", rows, shape="encoder-decoder")


def test_sft_reads_the_prompt_and_writes_the_completion(tmp_path, rows):
    pairs = [{"prompt": row["source"], "completion": row["target"]} for row in rows]
    recipe = sft(tmp_path, pairs)
    train = prepare(recipe("data.eval_fraction=0")).train
    assert text(train.dataset[0]["input_ids"]) == pairs[0]["prompt"]
    assert text(train.dataset[0]["labels"]) == pairs[0]["completion"] and train.dataset[0]["labels"][-1] == EOS
    folder = run_recipe(recipe("train.max_steps=40", "train.eval_strategy=steps", "train.eval_steps=40"))
    metrics = metrics_of(folder)
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 1
    assert metrics["after"]["character_error_rate"] < metrics["before"]["character_error_rate"]


@pytest.mark.parametrize("form", ["messages", "prompt-completion"])
def test_sft_of_one_question_needs_no_chat_template(tmp_path, form):
    def row(i):
        asked, answer = [{"role": "user", "content": f"q{i}"}], [{"role": "assistant", "content": f"a{i}"}]
        return {"messages": asked + answer} if form == "messages" else {"prompt": asked, "completion": answer}

    prepared = prepare(sft(tmp_path, [row(i) for i in range(8)])("data.eval_fraction=0"))
    assert text(prepared.train.dataset[3]["input_ids"]) == "q3" and text(prepared.train.dataset[3]["labels"]) == "a3"
    assert asked_text(row(3)) == "q3"


def test_sft_of_a_conversation_reads_all_turns_and_writes_the_last(tmp_path, tiny_checkpoint):
    roles = ("system", "user", "assistant", "user", "assistant")
    talk = {"messages": [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]}
    recipe = sft(tmp_path, [talk] * 4)
    with pytest.raises(UserError, match="conversations of several turns, but the tokenizer has no chat template"):
        prepare(recipe("data.eval_fraction=0"))
    options = ("data.eval_fraction=0", f"model.tokenizer={tiny_checkpoint}")
    prepared = prepare(recipe(*options))
    tokenizer, row = prepared.tokenizer, prepared.train.dataset[0]
    expected = tokenizer.apply_chat_template(talk["messages"][:-1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(row["input_ids"]) == expected and "assistant 2" in expected
    assert tokenizer.decode(row["labels"]) == "assistant 4" + tokenizer.eos_token
    # The same as prompt and completion: what comes before the last answer is read, wherever it stands.
    split = {
        "prompt": talk["messages"][:2],
        "completion": [talk["messages"][2] | {"train": False}, *talk["messages"][3:]],
    }
    assert prepare(sft(tmp_path, [split] * 4)(*options)).train.dataset[0] == row


def test_sft_leaves_out_what_is_not_to_be_learned(tmp_path, tiny_checkpoint):
    def talk(*answer):
        return {"messages": [{"role": "user", "content": "Question"}, *answer]}

    told = {"role": "assistant", "content": "Answer"}
    rows = [talk(told), talk(told | {"train": False}), talk(told | {"weight": 0}), {"messages": [told]}]
    prepared = prepare(sft(tmp_path, rows)("data.eval_fraction=0", f"model.tokenizer={tiny_checkpoint}"))
    assert prepared.train.report.dropped == {
        "whose last answer is not trained on": 2,
        "without a message before the answer": 1,
    }
    assert len(prepared.train.dataset) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.packing_strategy=wrapped", r"train\.packing_strategy: wrapped cuts rows anywhere"),
        ("train.loss_type=dft", r"train\.loss_type: has no effect on an encoder-decoder"),
        ("objective.loss_on=all", r"objective\.loss_on: an encoder-decoder learns the last answer alone"),
        ("train.max_length=200", r"train\.max_length is 200, but the model has positions for 128"),
    ],
)
def test_what_only_a_decoder_has_is_refused(tmp_path, override, message):
    recipe = sft(tmp_path, [{"prompt": "a", "completion": "b"}] * 4)
    with pytest.raises(UserError, match=message):
        prepare(recipe("data.eval_fraction=0", override))
    prepare(recipe("data.eval_fraction=0", "train.packing=false", "train.max_length=64"))


def test_texts_are_no_pairs(tmp_path):
    with pytest.raises(UserError, match=r"is text, which the objective cannot use.*expected messages"):
        prepare(sft(tmp_path, [{"text": "a"}] * 4)())
