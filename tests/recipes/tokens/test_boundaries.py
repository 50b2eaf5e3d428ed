"""Where prompt and answer meet, which tokens are predicted, and one beginning token wherever a text is read."""

from types import SimpleNamespace

import pytest
import torch
from small_tokenizer import build
from template_families import ANSWER, FAMILIES, MORE, SECOND, USER
from transformers import AutoModelForCausalLM, AutoTokenizer

from anyformer.recipes.evaluation import held_out_loss, prompt_of_row
from anyformer.recipes.generator import Generator
from anyformer.recipes.tokens.preferences import tokenize_pairs
from anyformer.recipes.tokens.prompts import encode_prompt
from anyformer.recipes.tokens.supervised import tokenize_rows


def labels_of(data, tokenizer, row=0):
    return tokenizer.convert_ids_to_tokens([label for label in data.dataset[row]["labels"] if label != -100])


@pytest.mark.parametrize("style", ["byte", "metaspace", "unigram"])
def test_a_token_across_the_boundary_belongs_to_the_prompt(style):
    """The space and the word behind it are one token, or a part of one, whichever side of the boundary it is on."""
    tokenizer = build(style=style)
    mark = "Ġ" if style == "byte" else "▁"
    across, apart = (
        tokenize_rows([{"prompt": prompt, "completion": completion}], tokenizer, max_length=None)
        for prompt, completion in (("Is the ", "quick fox"), ("Is the", " quick fox"))
    )
    # The tokens are those of the whole text in both cases: a boundary changes labels, not ids.
    whole = [*tokenizer("Is the quick fox", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert across.dataset[0]["input_ids"] == apart.dataset[0]["input_ids"] == whole
    learned, all_learned = labels_of(across, tokenizer), labels_of(apart, tokenizer)
    assert all_learned[0].startswith(mark) and "".join(all_learned) == f"{mark}quick{mark}fox</s>"
    assert apart.report.merged == 0 and across.report.merged == 1
    # Only the token with the space is lost, however long it is.
    assert learned == all_learned[1:]


@pytest.mark.parametrize("style", ["byte", "metaspace", "unigram"])
@pytest.mark.parametrize("name", ["chatml", "llama-2", "llama-3", "gemma", "zephyr"])
def test_answers_in_templates_under_every_kind_of_tokenizer(style, name):
    family = FAMILIES[name]
    tokenizer = build(family.template, style=style, tokens=family.tokens)
    data = tokenize_rows([{"messages": [USER, ANSWER, MORE, SECOND]}], tokenizer, max_length=None)
    learned = tokenizer.decode([label for label in data.dataset[0]["labels"] if label != -100])
    expected = "".join(f"{turn['content']}{family.end.strip()}" for turn in (ANSWER, SECOND))
    assert learned.replace(" ", "") == expected.replace(" ", "")
    assert data.report.merged == 0 and data.report.stopped == 1


def test_one_beginning_token_and_the_same_ids_everywhere():
    """The tokenizer adds one to plain text, the template writes one: a conversation has the template's alone."""
    family = FAMILIES["llama-3"]
    tokenizer = build(family.template, adds_bos=True, tokens=family.tokens)
    row = {"prompt": [USER], "completion": [ANSWER]}
    trained = tokenize_rows([row], tokenizer, max_length=None).dataset[0]
    start = next(i for i, label in enumerate(trained["labels"]) if label != -100)
    prompt = trained["input_ids"][:start]
    assert prompt.count(tokenizer.bos_token_id) == 1 and prompt[0] == tokenizer.bos_token_id
    assert prompt == tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    pair = {"prompt": [USER], "chosen": [ANSWER], "rejected": [SECOND]}
    for ids in (
        prompt_of_row(row, tokenizer)[2],
        prompt_of_row({"messages": [USER, ANSWER]}, tokenizer)[2],
        Generator.encode(SimpleNamespace(tokenizer=tokenizer), [USER]),
        encode_prompt([USER], tokenizer),
        tokenize_pairs([pair], tokenizer, max_length=64).dataset[0]["prompt_ids"],
    ):
        assert ids == prompt
    plain = {"prompt": "Is the", "completion": " fox"}
    trained = tokenize_rows([plain], tokenizer, max_length=None).dataset[0]["input_ids"]
    ids = prompt_of_row(plain, tokenizer)[2]
    assert trained[: len(ids)] == ids and trained.count(tokenizer.bos_token_id) == 1


def test_each_token_is_predicted_from_those_before_it(tiny_checkpoint):
    """Two full rows of 6 tokens count 10 targets; the loss is the cross-entropy of logits[:-1] against ids[1:]."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    rows = [{"text": "one two three four five"}, {"text": "the dog sat on the"}]
    data = tokenize_rows(rows, tokenizer, max_length=None)
    ids = torch.tensor(data.dataset["input_ids"][:])
    assert ids.shape == (2, 6) and data.report.supervised_tokens == 10
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint).eval()
    measured = held_out_loss(model, data.dataset, pad_token_id=tokenizer.pad_token_id, batch_size=1)
    with torch.no_grad():
        logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert measured.tokens == 10 and abs(measured.loss - expected.item()) < 1e-5
