"""What a recipe may ask of soft prompts, shown to be wrong where it is refused; and going on with training."""

import datasets
import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from anyformer.recipes.errors import UserError
from anyformer.recipes.soft_prompts import (
    ENCODER_FILE,
    KINDS,
    continue_training,
    made_whole,
    prompt_learning_fields,
    soft_prompt_problem,
)

VIRTUAL = 4
SIZES = {"num_virtual_tokens": VIRTUAL}
# By name of a case: our name of the kind, PEFT's class, and its arguments.
CASES = {
    "prompt": ("prompt-tuning", PromptTuningConfig, {}),
    "mlp": ("p-tuning", PromptEncoderConfig, {"encoder_hidden_size": 16}),
    "lstm": ("p-tuning", PromptEncoderConfig, {"encoder_hidden_size": 16, "encoder_reparameterization_type": "LSTM"}),
    "prefix": ("prefix-tuning", PrefixTuningConfig, {}),
    "projected": ("prefix-tuning", PrefixTuningConfig, {"prefix_projection": True, "encoder_hidden_size": 16}),
}
MADE = ("mlp", "lstm", "projected")  # their vectors are made by weights that PEFT does not save
cases = pytest.mark.parametrize("case", CASES)
kinds = pytest.mark.parametrize("kind", KINDS)
LATENT = {"attention": "mla", "num_key_value_heads": 4, "kv_lora_rank": 6}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
BOTH = {"architecture": "encoder-decoder", "decoder_start_token_id": 1}


def ids(*shape, low=3, high=101, seed=1):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def soften(model, case, task="CAUSAL_LM"):
    kind, cls, arguments = CASES[case]
    torch.manual_seed(3)
    return get_peft_model(
        model, cls(task_type=task, **SIZES, **arguments, **prompt_learning_fields(model.config, kind))
    )


def case_of(kind):
    return next(case for case, (name, *_) in CASES.items() if name == kind)


# Sizes


def test_the_sizes_of_a_prefix_are_those_of_keys_and_values(tiny):
    wide = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3}
    model = tiny(**wide)
    fields = prompt_learning_fields(model.config, "prefix-tuning")
    assert fields == {
        "num_layers": 3,
        "num_attention_heads": 2,
        "token_dim": 32,
        "num_transformer_submodules": 1,
    }
    cache = model(ids(1, VIRTUAL)).cache
    shapes = {tuple(part.shape) for layer in cache.layers for part in (layer.keys, layer.values)}
    assert shapes == {(1, fields["num_attention_heads"], VIRTUAL, fields["token_dim"] // 2)}
    assert len(cache.layers) == fields["num_layers"]


@pytest.mark.parametrize("fields", [{}, {"head_dim": 16, "num_key_value_heads": 1}, BOTH | {"num_encoder_layers": 3}])
@cases
def test_the_sizes_make_a_soft_prompt_every_vector_of_which_is_trained(tiny, case, fields):
    both = fields.get("architecture") == "encoder-decoder"
    model = soften(
        tiny(head="seq2seq_lm" if both else "causal_lm", **fields), case, "SEQ_2_SEQ_LM" if both else "CAUSAL_LM"
    )
    model(input_ids=ids(2, 7), labels=ids(2, 6 if both else 7, seed=2)).loss.backward()
    weight = model.prompt_encoder["default"].embedding.weight
    assert len(weight) == VIRTUAL and weight.grad.abs().sum(-1).all()
    if case == "prefix":
        assert weight.grad.abs().sum(0).all()


def test_there_are_no_sizes_for_what_is_refused(tiny):
    with pytest.raises(UserError, match=r"adapter\.kind: prefix-tuning: attention='mla' caches one latent"):
        prompt_learning_fields(tiny(**LATENT).config, "prefix-tuning")


# What is refused, and that it would be wrong


@kinds
def test_what_is_exact_is_not_refused(tiny, kind):
    for fields in ({}, {"position_embedding": "alibi", "sliding_window": 4}, {"head_dim": 16}, BOTH):
        config = tiny(head="base", **fields).config
        assert soft_prompt_problem(config, kind, virtual_tokens=VIRTUAL, max_length=500) is None
    learned = tiny(position_embedding="learned", max_position_embeddings=64).config
    assert soft_prompt_problem(learned, kind, virtual_tokens=4, max_length=60) is None
    for head in ("sequence_classification", "causal_lm"):
        assert soft_prompt_problem(learned, kind, head=head) is None
    if kind != "prefix-tuning":
        assert soft_prompt_problem(tiny(**LATENT).config, kind) is None


@pytest.mark.parametrize("case", ["prefix", "projected"])
def test_a_prefix_on_latent_attention_does_not_fit(tiny, case):
    model = tiny(**LATENT)
    assert "of two widths" in soft_prompt_problem(model.config, "prefix-tuning")
    _, cls, arguments = CASES[case]
    with pytest.raises(ValueError, match="prefix tuning has no place in it"):
        get_peft_model(model, cls(task_type="CAUSAL_LM", **SIZES, **arguments))(input_ids=ids(1, 5))


@pytest.mark.parametrize("kind", ["prompt-tuning", "p-tuning"])
def test_labels_of_tokens_do_not_move_behind_the_vectors(tiny, kind):
    case, tokens = case_of(kind), ids(2, 6)
    for head, task in (("token_classification", "TOKEN_CLS"), ("masked_lm", "FEATURE_EXTRACTION")):
        fields = {"architecture": "encoder", "head": head}
        model = soften(tiny(**fields), case, task)
        assert "does not move the labels" in soft_prompt_problem(model.base_model.config, kind, head=head)
        assert soft_prompt_problem(model.base_model.config, "prefix-tuning", head=head) is None
        with pytest.raises(ValueError, match="batch_size"):
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens % 2)
    fields = {"architecture": "encoder", "head": "question_answering"}
    model = soften(tiny(**fields), case, "QUESTION_ANS").eval()
    assert "does not move the labels" in soft_prompt_problem(model.base_model.config, kind, head="question_answering")
    at = torch.tensor([1, 2])
    output = model(input_ids=tokens, start_positions=at, end_positions=at)
    right = [torch.nn.functional.cross_entropy(x, at + VIRTUAL) for x in (output.start_logits, output.end_logits)]
    assert (output.loss - sum(right) / 2).abs() > 0.1


@kinds
def test_a_classifier_on_an_encoder_decoder_is_impossible(tiny, kind):
    tokens = ids(2, 6)
    mask = torch.ones_like(tokens)
    model = tiny(head="sequence_classification", **BOTH)
    assert "reads its text twice" in soft_prompt_problem(model.config, kind, head="sequence_classification")
    fault = "needs input_ids" if kind != "prefix-tuning" else r"size of tensor a \(10\) must match"
    with pytest.raises((ValueError, RuntimeError), match=fault):
        soften(model, case_of(kind), "SEQ_CLS")(input_ids=tokens, attention_mask=mask)


@cases
def test_learned_positions_end(tiny, case):
    model = soften(tiny(position_embedding="learned", max_position_embeddings=16), case).eval()
    kind, config = CASES[case][0], model.base_model.config
    problem = soft_prompt_problem(config, kind, virtual_tokens=VIRTUAL, max_length=13)
    assert "need 17 positions" in problem and "max_position_embeddings=16" in problem
    with pytest.raises(ValueError, match="position 16 lies beyond"):
        model(input_ids=ids(1, 13))
    assert soft_prompt_problem(config, kind, virtual_tokens=VIRTUAL, max_length=12) is None
    model(input_ids=ids(1, 12))


@cases
def test_checkpointing_comes_after_attaching(tiny, case):
    """PEFT refuses a prefix on a model where it is on already, which a trainer never has: it attaches first."""
    model = tiny()
    model.gradient_checkpointing_enable()
    if CASES[case][0] == "prefix-tuning":
        with pytest.raises(ValueError, match="does not work with gradient checkpointing"):
            soften(model, case)
    else:
        soften(model, case)


def test_continuous_batching_would_forget_the_soft_prompt(tiny):
    with pytest.raises(UserError, match="without its soft prompt: use generate"):
        made_whole(soften(tiny(), "prompt")).generate_batch([[5, 6, 7]])


# Going on with training


@pytest.fixture
def trainer(tiny, tmp_path):
    """Builds a trainer over a few rows; the adapter is attached in it, as a run does."""

    def build(case, folder="run", **arguments):
        words = Tokenizer(models.WordLevel({str(i): i for i in range(101)}, unk_token="0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")
        rows = [ids(n, seed=n).tolist() for n in (5, 7, 4, 6, 8, 5, 6, 7)]
        data = datasets.Dataset.from_list([{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows])
        kind, cls, own = CASES[case]
        model = tiny(initializer_range=0.1, hidden_dropout=0.1)
        fields = prompt_learning_fields(model.config, kind)
        values = {"output_dir": str(tmp_path / folder), "max_steps": 4, "per_device_train_batch_size": 2, "seed": 7}
        values |= {"save_steps": 2, "logging_steps": 1, "learning_rate": 0.05, "report_to": "none", "use_cpu": True}
        torch.manual_seed(7)
        made = SFTTrainer(
            model=model,
            args=SFTConfig(**values | {"bf16": False, "disable_tqdm": True, "save_strategy": "steps"} | arguments),
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=cls(task_type="CAUSAL_LM", **SIZES, **own, **fields),
        )
        made_whole(made.model)
        return made

    return build


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("checkpointing", [False, True])
@cases
def test_a_resumed_training_ends_bit_for_bit_as_one_that_never_stopped(trainer, case, checkpointing):
    whole = trainer(case, gradient_checkpointing=checkpointing)
    start = weights(whole.model)
    whole.train()
    expected = weights(whole.model)
    assert all(not torch.equal(start[name], expected[name]) for name in expected)
    assert all(name.startswith("prompt_encoder.") for name in expected)
    resumed = trainer(case, gradient_checkpointing=checkpointing)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    got = weights(resumed.model)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_the_trainer_s_loss_is_that_of_the_model(trainer):
    for case in CASES:
        made = trainer(case, learning_rate=0.0, max_steps=1, per_device_train_batch_size=8)
        made.model.base_model.model.embed_dropout.p = 0.0
        for layer in made.model.base_model.model.layers:
            layer.resid_dropout.p = 0.0
        made.train()
        (logged,) = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        batch = next(iter(made.get_train_dataloader()))
        with torch.no_grad():
            logits = made.model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        length = batch["input_ids"].shape[1]
        expected = torch.nn.functional.cross_entropy(
            logits[:, -length:-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )
        assert abs(logged - expected.item()) < 1e-4  # the log rounds to four digits


@pytest.mark.parametrize("case", MADE)
def test_the_best_checkpoint_comes_back_whole(trainer, case):
    made = trainer(case)
    made.train()
    last = weights(made.model)
    made.model.load_adapter(f"{made.args.output_dir}/checkpoint-2", "default")
    assert any(not torch.equal(last[name], weight) for name, weight in weights(made.model).items())
    made.model.load_adapter(f"{made.args.output_dir}/checkpoint-4", "default")
    assert all(torch.equal(last[name], weight) for name, weight in weights(made.model).items())


@pytest.mark.parametrize("case", MADE)
def test_without_the_weights_that_make_the_vectors_a_resume_is_refused(tiny, case, tmp_path):
    """PEFT itself would take the finished vectors of p-tuning for the input of a fresh encoder."""
    saved = soften(tiny(), case).eval()
    saved.save_pretrained(tmp_path)  # PEFT's own: no file of ours
    again = soften(tiny(), case).eval()
    if case == "projected":
        with pytest.raises(RuntimeError, match="size mismatch"):
            again.load_adapter(tmp_path, "default", is_trainable=True)
    else:
        again.load_adapter(tmp_path, "default", is_trainable=True)
        change = again(input_ids=ids(1, 6)).logits - saved(input_ids=ids(1, 6)).logits
        assert change.abs().max() > 1e-3
    with pytest.raises(UserError, match=f"not the weights that make them .{ENCODER_FILE}"):
        made_whole(again).load_adapter(tmp_path, "default", is_trainable=True)


@pytest.mark.parametrize("whole", [True, False])
@cases
def test_a_step_from_a_saved_soft_prompt_starts_there_and_moves_it(tiny, case, whole, tmp_path):
    tokens = ids(2, 7)
    tuned = made_whole(soften(tiny(), case)).eval()
    expected = tuned(input_ids=tokens).logits.detach()
    tuned.save_pretrained(tmp_path / "first")
    assert (tmp_path / "first" / ENCODER_FILE).is_file() == (case in MADE)
    if not whole:
        (tmp_path / "first" / ENCODER_FILE).unlink(missing_ok=True)
    again = continue_training(tiny(), tmp_path / "first")
    assert again.training
    torch.testing.assert_close(again.eval()(input_ids=tokens).logits, expected, rtol=0, atol=1e-5)
    trained = [weight for weight in again.parameters() if weight.requires_grad]
    assert len(trained) == (len(list(tuned.prompt_encoder.parameters())) if whole else 1)
    optimizer = torch.optim.SGD(trained, lr=0.01)
    before = again(input_ids=tokens, labels=tokens).loss
    before.backward()
    optimizer.step()
    moved = again(input_ids=tokens, labels=tokens)
    assert moved.loss < before
    folder = tmp_path / "first"  # over the one before
    again.save_pretrained(folder)
    assert (folder / ENCODER_FILE).is_file() == (whole and case in MADE)
    opened = PeftModel.from_pretrained(tiny(), folder)
    logits = opened(input_ids=tokens).logits
    torch.testing.assert_close(logits[:, -7:], moved.logits[:, -7:], rtol=0, atol=1e-5)


@kinds
def test_a_classifier_goes_on_with_its_last_layer(tiny, kind, tmp_path):
    fields = {"architecture": "encoder", "head": "sequence_classification", "num_labels": 3}
    tuned = made_whole(soften(tiny(**fields), case_of(kind), "SEQ_CLS")).eval()
    tokens, labels = ids(2, 7), torch.tensor([0, 2])
    with torch.no_grad():
        tuned.base_model.score.modules_to_save["default"].weight.normal_()
        expected = tuned(input_ids=tokens).logits
    tuned.save_pretrained(tmp_path)
    again = continue_training(tiny(**fields), tmp_path).eval()
    torch.testing.assert_close(again(input_ids=tokens).logits, expected, rtol=0, atol=1e-5)
    again(input_ids=tokens, labels=labels).loss.backward()
    moved = {name.split(".")[0] for name, weight in again.named_parameters() if weight.grad is not None}
    assert moved == {"prompt_encoder", "base_model"}
    assert all("score" in n for n, w in again.base_model.named_parameters() if w.grad is not None)


def test_other_adapters_go_on_as_peft_has_them(tiny, tmp_path):
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny(), config)
    before = type(model)
    assert type(made_whole(model)) is before
    model.save_pretrained(tmp_path)
    again = continue_training(tiny(), tmp_path)
    names = [{name for name, weight in m.named_parameters() if weight.requires_grad} for m in (model, again)]
    assert names[0] == names[1] and all("lora_" in name for name in names[0])
    assert torch.equal(again(input_ids=ids(1, 5)).logits, model(input_ids=ids(1, 5)).logits)


def test_the_class_of_a_soft_prompt_is_changed_once(tiny):
    soft = soften(tiny(), "mlp")
    assert type(made_whole(soft)) is type(made_whole(soft)) and isinstance(soft, PeftModel)
