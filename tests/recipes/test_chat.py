"""Chat: what the model is given, turn by turn, and when it stops.

The model is one whose answer is known: layers that add nothing to the embedding, so that the next token depends on
the last one alone. To anything it answers "one two" and ends its turn; after the end it would go on with "x".
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from anyformer import AnyformerConfig, AnyformerForCausalLM
from anyformer.recipes.chat import chat
from anyformer.recipes.errors import UserError
from anyformer.recipes.generation import generate
from anyformer.recipes.tokens.supervised import tokenize_rows
from anyformer.scripts.cli import app

ANSWER = "one two"


def import_model(source: Path, target: Path) -> Path:
    result = CliRunner().invoke(app, ["import", str(source), str(target)])
    assert result.exit_code == 0, result.output
    return target


def chain_model(tokenizer, positions: int, *, ends: bool = True) -> LlamaForCausalLM:
    """A Llama in which token follows token as in a table; see above. Without `ends`, "two" is followed by "x"."""
    size = len(tokenizer)
    table = torch.zeros(size, size)  # [next, last]
    line_break, end, x = (tokenizer.convert_tokens_to_ids(t) for t in ("Ċ", "<|im_end|>", "x"))
    steps = [line_break, *tokenizer(ANSWER, add_special_tokens=False)["input_ids"], end, x]
    assert len(set(steps)) == len(steps)
    for last, following in zip(steps, [*steps[1:], x], strict=True):
        table[following, last] = 1.0
    if not ends:
        table[end], table[x, steps[-3]] = 0.0, 1.0
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=positions,
        head_dim=8,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(table)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    return model


@pytest.fixture(scope="module")
def folder(tiny_checkpoint, tmp_path_factory) -> Path:
    """An imported model whose tokenizer and chat template both write a BOS token, as Llama 3's do."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[bos])
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    source = tmp_path_factory.mktemp("chat") / "source"
    chain_model(tokenizer, positions=160).save_pretrained(source)
    tokenizer.save_pretrained(source)
    target = import_model(source, source.with_name("model"))
    assert AutoTokenizer.from_pretrained(target)("a")["input_ids"][0] == tokenizer.bos_token_id
    return target


@pytest.fixture
def talk(folder, monkeypatch):
    """A function: chat with these lines typed. Returns the ids that the model was given and gave, for each answer."""

    def run(*lines: str, path: Path | str = folder, **options) -> list[tuple[list[int], list[int]]]:
        turns = []
        generate = AnyformerForCausalLM.generate

        def recorded(self, input_ids, **arguments):
            output = generate(self, input_ids=input_ids, **arguments)
            turns.append((input_ids[0].tolist(), output[0, input_ids.shape[1] :].tolist()))
            return output

        typed = iter(lines)

        def read(prompt: str) -> str:
            assert prompt
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        with monkeypatch.context() as patch:
            patch.setattr(AnyformerForCausalLM, "generate", recorded)
            chat(str(path), read=read, **options)
        assert next(typed, None) is None or "/exit" in lines or "/quit" in lines
        return turns

    return run


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_a_temperature_that_overflows_is_refused(folder):
    with pytest.raises(UserError, match=r"at least 0\.01"):
        chat(str(folder), temperature=1e-9, read=lambda prompt: "/exit")


@pytest.mark.parametrize("typed", [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "\udcff"])
def test_a_line_that_is_not_utf8_is_asked_for_again(folder, capsys, typed):
    lines = iter([typed, "/exit"])

    def read(prompt):
        line = next(lines)
        if isinstance(line, Exception):
            raise line
        return line

    chat(str(folder), read=read)
    assert "not UTF-8" in capsys.readouterr().out


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


ANSWERED = {"role": "assistant", "content": ANSWER}


def test_turns_are_given_back_and_the_ids_are_those_of_training(talk, tokenizer, capsys):
    turns = talk("the cat sat", "five four three")
    assert len(turns) == 2
    conversation = [user("the cat sat"), ANSWERED, user("five four three"), ANSWERED]
    for count, (prompt, answer) in zip((2, 4), turns, strict=True):
        trained = tokenize_rows([{"messages": conversation[:count]}], tokenizer, max_length=None).dataset[0]
        # The template's last line break comes after the end of the turn.
        assert trained["input_ids"][: len(prompt) + len(answer)] == prompt + answer
        supervised = [label for label in trained["labels"][len(prompt) :] if label != -100]
        assert answer == supervised
        assert prompt.count(tokenizer.bos_token_id) == 1 and prompt[0] == tokenizer.bos_token_id
    assert f"assistant\n{ANSWER}<|im_end|>" in tokenizer.decode(turns[1][0])
    assert capsys.readouterr().out == f"{ANSWER}\n{ANSWER}\n\n"


def test_it_stops_at_the_end_of_the_turn(talk, tokenizer):
    """And not only where the end of the turn is the end-of-sequence token."""
    ((_, answer),) = talk("hello", max_new_tokens=30)
    assert tokenizer.decode(answer) == ANSWER + "<|im_end|>"
    ((_, answer),) = talk("hello", max_new_tokens=1)
    assert len(answer) == 1


def test_it_stops_at_an_end_of_turn_that_is_not_the_eos(folder, talk, tokenizer, tmp_path):
    other = AutoTokenizer.from_pretrained(folder)
    other.eos_token = "<|pad|>"
    model = AnyformerForCausalLM.from_pretrained(folder)
    model.config.eos_token_id = model.generation_config.eos_token_id = other.eos_token_id
    model.save_pretrained(tmp_path / "m")
    other.save_pretrained(tmp_path / "m")
    ((_, answer),) = talk("hello", path=tmp_path / "m", max_new_tokens=30)
    assert tokenizer.decode(answer) == ANSWER + "<|im_end|>"


def test_clear_forgets_all_but_the_system_message(talk, tokenizer):
    turns = talk("the cat sat", "/clear", "the log", system="Be brief.")
    expected = [
        f"<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        for text in ("the cat sat", "the log")
    ]
    assert [tokenizer.decode(prompt) for prompt, _ in turns] == expected


def test_empty_lines_are_no_turns(talk, tokenizer):
    turns = talk("", "   ", "  the cat sat ", "", "two")
    assert len(turns) == 2
    assert tokenizer.decode(turns[0][0]).startswith("<s><|im_start|>user\nthe cat sat<|im_end|>")
    assert tokenizer.decode(turns[1][0]).count("<|im_start|>user") == 2


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_exit_leaves_and_reads_no_further(talk, word):
    assert len(talk("hello", word, "never read")) == 1


def test_the_end_of_input_leaves(talk):
    assert talk() == []


def with_learned_positions(source: Path, target: Path) -> Path:
    """The model with a table of positions that adds nothing, in place of a rotary embedding."""
    model = AnyformerForCausalLM.from_pretrained(source)
    fields = {name: value for name, value in model.config.to_dict().items() if name != "rope_parameters"}
    other = AnyformerForCausalLM(AnyformerConfig(**fields | {"position_embedding": "learned"}))
    with torch.no_grad():
        other.model.positions.weight.zero_()
    other.load_state_dict(model.state_dict(), strict=False)
    other.generation_config = model.generation_config
    other.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def ending(folder, tmp_path_factory) -> Path:
    """The same model, whose positions end."""
    return with_learned_positions(folder, tmp_path_factory.mktemp("chat") / "ending")


TOO_LONG = "more than the model has positions for. /clear forgets"
BEYOND = "longer than the 160 tokens that the model was trained for"
LINE = "the cat sat on the mat, the dog sat on the log"


def test_a_line_beyond_the_positions_is_refused_and_the_chat_goes_on(talk, ending, tokenizer, capsys):
    turns = talk("the cat sat", "the cat sat on the mat " * 40, "five", path=ending)
    assert capsys.readouterr().out.count(TOO_LONG) == 1
    assert [tokenizer.decode(prompt).count("<|im_start|>user") for prompt, _ in turns] == [1, 2]
    assert "mat" not in tokenizer.decode(turns[1][0])


def test_a_conversation_beyond_the_positions_can_be_cleared(talk, ending, capsys):
    """Turns that fit one by one: at some point no more is answered, and /clear is the remedy that is named."""
    turns = talk(*[LINE] * 12, "/clear", LINE, path=ending)
    assert 1 < len(turns) < 13
    assert capsys.readouterr().out.count(TOO_LONG) == 13 - len(turns)
    assert turns[-1][0] == turns[0][0]
    assert all(len(prompt) + len(answer) <= 160 for prompt, answer in turns)


def test_a_conversation_beyond_the_trained_length_goes_on_and_it_is_said_once(talk, tokenizer, capsys):
    turns = talk(*[LINE] * 12, "/clear", *[LINE] * 7)
    assert len(turns) == 19 and len(turns[11][0]) > 320
    assert tokenizer.decode(turns[11][0]).count(LINE) == 12  # nothing is left out
    assert all(tokenizer.decode(answer) == ANSWER + "<|im_end|>" for _, answer in turns)
    said = capsys.readouterr().out
    assert said.count(BEYOND) == 2 and TOO_LONG not in said  # once in each conversation


def test_an_answer_ends_where_the_positions_do_and_it_is_said(folder, talk, tokenizer, tmp_path, capsys):
    chain_model(tokenizer, positions=160, ends=False).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    goes_on = import_model(tmp_path / "source", tmp_path / "m")
    path = with_learned_positions(goes_on, tmp_path / "ending")
    ((prompt, answer),) = talk("a" * 100, path=path, max_new_tokens=10_000)
    assert len(prompt) + len(answer) == 160
    assert tokenizer.decode(answer) == ANSWER + "x" * (len(answer) - 2)
    assert "the answer is cut off where the model's positions end" in capsys.readouterr().out
    ((prompt, answer),) = talk("a", path=path, max_new_tokens=20)
    assert len(answer) == 20 and "cut off" not in capsys.readouterr().out
    ((prompt, answer),) = talk("a" * 100, path=goes_on, max_new_tokens=200)
    assert len(answer) == 200 and BEYOND in capsys.readouterr().out


def test_answers_of_a_batch_say_what_their_length_means(folder, ending, capsys):
    prompts = ["a", "a" * 400, "b" * 400]
    assert list(generate(str(folder), prompts)) == [ANSWER] * 3
    said = capsys.readouterr().err
    assert said.count(BEYOND) == 1 and f"prompt 2: prompt and answer are {BEYOND}" in said
    with pytest.raises(UserError, match=r"prompt 2 has 4.. tokens, and the model has positions for 159"):
        list(generate(str(ending), prompts))
    full = "a" * 138  # with the template, 158 of 160
    told: list[str] = []
    (answer,) = generate(str(ending), [full], tell=told.append)
    assert ANSWER.startswith(answer) and told == ["prompt 1: the answer is cut off where the model's positions end"]


def test_sampling_is_decided_by_the_seed(tiny_checkpoint, tmp_path, capsys):
    path = str(import_model(tiny_checkpoint, tmp_path / "m"))

    def answer(**options) -> str:
        lines = iter(["one two", "/exit"])
        capsys.readouterr()
        chat(path, read=lambda prompt: next(lines), max_new_tokens=24, **options)
        return capsys.readouterr().out

    first = answer(temperature=1.0, seed=1)
    assert first == answer(temperature=1.0, seed=1)
    assert first != answer(temperature=1.0, seed=2)
    assert answer(seed=1) == answer(seed=2)


def test_no_chat_template(folder, tmp_path, talk):
    AnyformerForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match="has no chat template"):
        talk("hello", path=tmp_path / "m")


def test_no_model_or_no_tokenizer(folder, tmp_path, talk):
    with pytest.raises(UserError, match="at/all: no such folder or file"):
        talk("hello", path="/nowhere/at/all")
    AnyformerForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match="no tokenizer can be read"):
        talk("hello", path=tmp_path / "m")


def anyformer(*words: str, typed: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-c", "from anyformer.scripts.cli import main; main()", *words]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("last", ["/exit\nnever read\n", "", "no line break at the end"])
def test_piped_input(folder, last):
    done = anyformer("chat", str(folder), typed=f"the cat sat\n\nfive\n{last}")
    assert done.returncode == 0, done.stderr
    answers = 2 + last.startswith("no line")
    assert done.stdout.count(ANSWER + "\n") == answers and done.stdout.count(ANSWER) == answers
    assert "Traceback" not in done.stderr


def test_a_mistake_is_status_2(folder):
    for words, part in (
        (["/nowhere/at/all"], "/nowhere/at/all: no such"),
        ([str(folder), "--max-new-tokens", "0"], "--max-new-tokens"),
    ):
        done = anyformer("chat", *words, typed="hello\n")
        assert done.returncode == 2 and part in done.stderr and "Traceback" not in done.stderr
        assert done.stdout == ""
