"""`generate` and `chat` under the head that a folder names: encoder-decoders write, classifiers are told what they are
for."""

import json
from pathlib import Path

import pytest
import torch
from labelled import write_recipe
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

from anyformer.recipes.chat import chat
from anyformer.recipes.errors import UserError
from anyformer.recipes.generation import generate
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer
from anyformer.scripts.cli import app

PAIRS = {"uno": "one", "due": "two", "tre": "three"}
LEARN = ("train.max_steps=40", "train.learning_rate=1e-2", "eval.samples=0")
QUESTIONS = ["due b", "uno and more words", "tre"]


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def make(tiny_checkpoint, tmp_path_factory):
    """A function: the folder of a run of an encoder-decoder, on chats or on plain pairs."""

    def run(objective: str, chats: bool, *overrides: str) -> Path:
        rows = []
        for i in range(12):
            for source, target in PAIRS.items():
                if objective == "seq2seq":
                    rows.append({"source": f"{source} {i}", "target": target})
                elif chats:
                    answer = [{"role": "assistant", "content": target}]
                    rows.append({"messages": asked(f"{source} {i}") + answer})
                else:
                    rows.append({"prompt": f"{source} {i}", "completion": target})
        recipe = write_recipe(tmp_path_factory.mktemp("run"), objective, rows, shape="encoder-decoder")
        tokenizer = f"model.tokenizer={tiny_checkpoint}" if chats else "model.tokenizer=builtin:bytes"
        return run_recipe(recipe(tokenizer, "model.config.vocab_size=300", *LEARN, *overrides))

    return run


@pytest.fixture(scope="module")
def on_chats(make):
    return make("sft", True)


@pytest.fixture(scope="module")
def on_pairs(make):
    return make("sft", False)


def by_hand(folder, texts, **options):
    """Greedy answers of the class in the folder, row by row without padding."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    answers = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", **options)["input_ids"]
        output = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, num_beams=1)
        answers.append(tokenizer.decode(output[0], skip_special_tokens=True).strip())
    return answers


def rendered(folder, *conversations):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for turns in conversations]


def test_an_encoder_decoder_tuned_on_chats_answers_as_it_was_trained(on_chats):
    expected = by_hand(on_chats, rendered(on_chats, *map(asked, QUESTIONS)), add_special_tokens=False)
    assert list(generate(str(on_chats), QUESTIONS, max_new_tokens=12)) == expected
    assert {"one", "two", "three"} & set(expected), "it has learned something"


def test_an_encoder_decoder_tuned_on_plain_pairs_reads_the_prompt_as_it_stands(on_pairs):
    expected = by_hand(on_pairs, QUESTIONS)
    assert list(generate(str(on_pairs), QUESTIONS, max_new_tokens=12)) == expected
    assert "system message needs a chat template" in refused("generate", on_pairs, "due", "--system", "Be brief.")


def test_a_run_on_sources_gets_no_template_though_its_tokenizer_has_one(make):
    folder = make("seq2seq", True)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert list(generate(str(folder), QUESTIONS, max_new_tokens=12)) == by_hand(folder, QUESTIONS)


def test_an_adapter_of_an_encoder_decoder_is_opened_on_its_base(make):
    folder = make("sft", False, "adapter={kind: lora, r: 4, merge: false}")
    assert (folder / "adapter_config.json").is_file()
    assert list(generate(str(folder), QUESTIONS, max_new_tokens=12)) == by_hand(folder, QUESTIONS)


def test_a_stock_encoder_decoder_is_opened_as_what_it_is(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, initializer_factor=3.0, decoder_start_token_id=0))
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    answers = list(generate(str(tmp_path), QUESTIONS, max_new_tokens=12, batch_size=3))
    assert answers == by_hand(tmp_path, QUESTIONS)


def talk(folder, *lines):
    typed = iter([*lines, "/exit"])
    chat(str(folder), read=lambda prompt: next(typed), max_new_tokens=12)


def test_a_chat_with_an_encoder_decoder_reads_all_turns(on_chats, capsys):
    capsys.readouterr()
    talk(on_chats, "due 3", "uno 4", "/clear", "tre 5")
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (first,) = by_hand(on_chats, rendered(on_chats, asked("due 3")), add_special_tokens=False)
    turns = [*asked("due 3"), {"role": "assistant", "content": first}, *asked("uno 4")]
    second, third = by_hand(on_chats, rendered(on_chats, turns, asked("tre 5")), add_special_tokens=False)
    assert said == [first, second, third]


def test_without_a_template_each_line_of_a_chat_is_a_source(on_pairs, capsys):
    capsys.readouterr()
    talk(on_pairs, *QUESTIONS)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == by_hand(on_pairs, QUESTIONS)
    with pytest.raises(UserError, match="a system message needs a chat template"):
        chat(str(on_pairs), system="Be brief.", read=lambda prompt: "/exit")


def test_a_source_beyond_the_positions_is_refused(make, capsys):
    folder = make("sft", False, "model.config.position_embedding=learned", "train.max_steps=1")
    assert len(list(generate(str(folder), ["x" * 128], max_new_tokens=500))) == 1  # source and answer have their own
    assert "prompt 1 has 129 tokens, and the model has positions for 128" in refused("generate", folder, "x" * 129)
    capsys.readouterr()
    talk(folder, "x" * 129)
    assert "more than the model has positions for" in capsys.readouterr().out


def test_a_source_beyond_the_trained_length_is_read_and_that_is_said(on_pairs, capsys):
    expected = by_hand(on_pairs, ["due" + "x" * 140])
    told: list[str] = []
    assert list(generate(str(on_pairs), ["due" + "x" * 140], max_new_tokens=12, tell=told.append)) == expected
    assert len(told) == 1 and "longer than the 128 tokens that the model was trained for" in told[0]
    capsys.readouterr()
    talk(on_pairs, "due" + "x" * 140)
    assert "longer than the 128 tokens" in capsys.readouterr().out


# Models that write nothing


def refused(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    return result.output


HEADS = {
    "sequence_classification": "is a classifier of texts: it writes no text. Use transformers.pipeline('text-class",
    "token_classification": "is a classifier of tokens: it writes no text. Use transformers.pipeline('token-class",
    "question_answering": "marks the answer in a text it is given: it writes no text. Use transformers.AutoModelForQ",
    "masked_lm": "is a masked language model, which fills gaps in texts: it writes no text. Use transformers.pipeline(",
    "pretraining": "is an encoder under the heads of its pretraining: it writes no text. Use transformers.AutoModelF",
    "base": "is a model without a head, which gives hidden states: it writes no text. Use transformers.AutoModel.",
}


@pytest.mark.parametrize("verb", [("generate", "one"), ("chat",)], ids=["generate", "chat"])
@pytest.mark.parametrize("head", HEADS)
def test_a_head_that_writes_nothing_is_told_what_it_is_for(tiny, tmp_path, head, verb):
    tiny(head=head, architecture="encoder", pooler=True, type_vocab_size=2, num_labels=3).save_pretrained(tmp_path)
    said = refused(verb[0], tmp_path, *verb[1:])
    assert HEADS[head] in said and "Auto" not in said.replace("transformers.Auto", "") and "Anyformer" not in said


def test_a_reward_model_is_told_apart_from_a_classifier(tiny, tmp_path):
    model = tiny(head="sequence_classification", num_labels=1)
    model.save_pretrained(tmp_path / "whole")
    said = refused("chat", tmp_path / "whole")
    assert "is a reward model or a regression" in said and "objective.reward in a recipe for grpo" in said
    config = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear")
    model.name_or_path = str(tmp_path / "whole")
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    fields["base_model_name_or_path"] = str(tmp_path / "whole")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    said = refused("generate", tmp_path / "adapter", "one")
    assert "is an adapter of a classifier of texts: it writes no text. `anyformer merge`" in said
