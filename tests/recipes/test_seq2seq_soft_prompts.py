"""Soft prompts of encoder-decoders: trained, kept apart, opened, and writing what was trained; and their room."""

import pytest
import torch
from labelled import metrics_of, write_recipe
from peft import PeftModel
from test_adapters import SOFT

from anyformer.recipes.errors import UserError
from anyformer.recipes.generation import generate
from anyformer.recipes.generator import open_generator
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe

VIRTUAL = 6
WORDS = {"uno": "one", "due": "two", "tre": "three"}
QUESTIONS = ["due b", "uno and more words", "tre"]


def recipe_of(tmp_path, objective, **sizes):
    names = ("source", "target") if objective == "seq2seq" else ("prompt", "completion")
    rows = [dict(zip(names, (f"{word} {i}", WORDS[word]), strict=True)) for i in range(12) for word in WORDS]
    return write_recipe(tmp_path, objective, rows, shape="encoder-decoder", **sizes)


def greedy(generator, text, count):
    """Greedy tokens of one source by forward passes without a cache."""
    model, config = generator.model, generator.model.get_base_model().config
    ids = torch.tensor([generator.tokenizer(text)["input_ids"]])
    written = torch.tensor([[config.decoder_start_token_id]])
    for _ in range(count):
        with torch.no_grad():
            logits = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=written, use_cache=False
            ).logits
        written = torch.cat([written, logits[:, -1:].argmax(-1)], dim=1)
        if written[0, -1] == generator.tokenizer.eos_token_id:
            break
    return generator.decode(written[0]).strip()


@pytest.mark.parametrize("objective", ["seq2seq", "sft"])
@pytest.mark.parametrize("name", SOFT)
def test_a_soft_prompt_is_trained_kept_opened_and_writes(tmp_path, objective, name):
    """On a model of random weights, kept in the folder: the prompt alone learns."""
    recipe = recipe_of(tmp_path, objective, position_embedding="learned")
    train = ("train.learning_rate=0.1", "train.max_steps=12", "train.gradient_checkpointing=true", "eval.samples=1")
    folder = run_recipe(recipe(f"adapter={SOFT[name]}", *train))
    metrics = metrics_of(folder)
    assert metrics["after"]["loss"] < metrics["before"]["loss"] and metrics["finished"]
    assert metrics["adapter"]["virtual_tokens"] == VIRTUAL and not metrics["adapter"]["adapted"]
    generator = open_generator(str(folder))
    assert isinstance(generator.model, PeftModel) and generator.reads_apart
    expected = [greedy(generator, question, 12) for question in QUESTIONS]
    assert any(expected)
    assert list(generate(str(folder), QUESTIONS, max_new_tokens=12)) == expected  # a batch of unequal lengths
    (sample,) = metrics["samples_after"]
    assert list(generate(str(folder), [sample["prompt"]], max_new_tokens=64)) == [sample["answer"]]


# The model has positions for 128 tokens on either side.
LIMITS = {
    "prompt-tuning": (128 - VIRTUAL, 128),
    "p-tuning": (128 - VIRTUAL, 128),
    "prefix-tuning": (128, 128 - VIRTUAL),
}


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("objective", ["seq2seq", "sft"])
def test_a_soft_prompt_takes_positions_where_it_stands_and_no_others(tmp_path, objective, kind):
    recipe = recipe_of(tmp_path, objective, position_embedding="learned")
    prepared = prepare(recipe(f"adapter={SOFT[kind]}"))  # nobody set a length, so none is refused
    assert prepared.objective.limits == LIMITS[kind]


@pytest.mark.parametrize("kind", LIMITS)
def test_a_limit_beyond_the_room_is_refused_by_its_name(tmp_path, kind):
    side = "target" if kind == "prefix-tuning" else "source"
    given = (f"adapter={SOFT[kind]}", "objective.max_source_length=128", "objective.max_target_length=128")
    message = rf"objective\.max_{side}_length is 128, but the model has positions for 128 tokens and the soft prompt"
    with pytest.raises(UserError, match=message):
        prepare(recipe_of(tmp_path, "seq2seq")(*given))
    message = r"train\.max_length is 128, but the model has positions for 128 tokens and the soft prompt takes 6"
    with pytest.raises(UserError, match=message):
        prepare(recipe_of(tmp_path, "sft")(given[0], "train.max_length=128"))
    assert prepare(recipe_of(tmp_path, "sft")(given[0], "train.max_length=122")).objective.limits == (122, 122)
