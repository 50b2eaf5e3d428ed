"""Rewards: what they score, and what is said of those that cannot be used."""

import pytest
import torch
from transformers import AutoTokenizer

from anyformer.recipes.errors import UserError
from anyformer.recipes.rewards import (
    column_problem,
    last_number,
    load_reward,
    pep257,
    reward_model_config,
    reward_problem,
    word_f1,
)


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("Return the larger of two numbers.", 5),
        ('"""Return the larger of two numbers."""', 5),
        ("return the larger of two numbers.", 4),
        ("Returns the larger of two numbers.", 4),
        ("This returns the larger of two numbers.", 4),
        ("Return the larger of two numbers", 4),
        ("Return it. Then go.", 4),
        ("Return\nit.", 4),
        ("Return " + "very " * 20 + "much.", 4),
        ("Process the rows.", 5),
        ("Pass.", 5),
        ("", 0),
    ],
)
def test_pep257_counts_five_marks(text, marks):
    assert pep257(["def f():"], [text]) == [marks / 5]


def test_last_number_compares_values():
    texts = ["so 1,024 it is", "1024.0", "first 3, then 7", "none", "-5"]
    assert last_number([""] * 5, texts, answer=["1024", 1024, 3, "0", "-5"]) == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_word_f1_is_that_of_squad():
    right = [{"role": "assistant", "content": "Return the event loop."}]
    texts = ["Return the event loop.", "return EVENT-LOOP", "Return return.", "Start a car", ""]
    # 3 of 3 words; the same; 1 shared of 2 and 3; none; none.
    assert word_f1([""] * 5, texts, completion=[right] * 5) == pytest.approx([1.0, 1.0, 2 / 5, 0.0, 0.0])
    assert word_f1([""], ["a b b"], completion=["b b c"]) == pytest.approx([4 / 5])  # "a" is an article
    assert word_f1(["", ""], ["The", ""], completion=["the", ""]) == [0.0, 0.0]
    with pytest.raises(UserError, match="row 2 has no `completion`"):
        word_f1(["", ""], ["a", "b"], completion=["a", None])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def length(prompts, completions, **columns):\n    return [len(c) for c in completions]\n"
        "def short(prompts, completions, **columns):\n    return [1.0]\n"
        "def broken(prompts, completions, **columns):\n    return [1 / 0]\n"
        "def endless(prompts, completions, **columns):\n    return [float('nan')] * len(completions)\n"
        "def nothing(prompts, completions, **columns):\n    pass\n"
        "def partly(prompts, completions, **columns):\n    return [1.0, None]\n"
        "def leaves(prompts, completions, **columns):\n    raise SystemExit(0)\n"
        "async def later(prompts, completions, **columns):\n    return [1.0] * len(completions)\n",
        encoding="utf-8",
    )
    return path


def test_a_function_of_a_file(file):
    reward = load_reward(f"{file}:length")
    answers = ["ab", [{"role": "assistant", "content": "abc"}]]
    assert reward(["p", "q"], answers, trainer_state=object(), completion_ids=[[1], [2]]) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "gives 1 numbers for 2 answers"),
        ("broken", "raises ZeroDivisionError"),
        ("endless", "no finite number"),
        ("nothing", "returns None instead of a list of numbers"),
        ("partly", "gives None for 1 of 2 answers"),
        ("leaves", "raises SystemExit: 0"),
    ],
)
def test_a_function_that_misbehaves_is_named(file, name, message):
    with pytest.raises(UserError, match=f"mine.py:{name}: .*{message}"):
        load_reward(f"{file}:{name}")(["p", "q"], ["a", "b"])


def test_problems_are_found_without_running_anything(file, tmp_path):
    assert reward_problem("pep257") is None and reward_problem(f"{file}:length") is None
    assert reward_problem("some/model") is None
    assert "cannot be read" in reward_problem(f"{tmp_path / 'none.py'}:f")
    assert "defines no function 'lenght'; it has length, short" in reward_problem(f"{file}:lenght")
    assert "did you mean length?" in reward_problem(f"{file}:lenght")
    assert reward_problem(f"{file}:later") == f"{file}:later is async; write a plain function"
    assert f"write {file}:FUNCTION; it has length, short" in reward_problem(str(file))
    assert "is no built-in reward (pep257, last-number, word-f1)" in reward_problem("accuracy")
    assert reward_problem("pep527").endswith("did you mean pep257?")
    assert reward_problem(str(tmp_path)) is None and reward_problem("stage:judge") is None
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n", encoding="utf-8")
    assert "is no Python" in reward_problem(f"{broken}:f")
    with pytest.raises(UserError, match="no model can be opened"):
        load_reward(str(tmp_path))


def test_a_file_that_ends_the_program_is_named(tmp_path):
    file = tmp_path / "ends.py"
    file.write_text("def f(prompts, completions, **columns): ...\nraise SystemExit(0)\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"ends\.py raises SystemExit: 0"):
        load_reward(f"{file}:f")


def test_a_folder_here_may_be_a_reward_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no folder here" in reward_problem("judge")
    (tmp_path / "judge").mkdir()
    assert reward_problem("judge") is None


def test_a_reward_model_scores_the_last_token_of_prompt_and_answer(tiny_checkpoint, tmp_path):
    import torch
    from transformers import AutoTokenizer

    import anyformer
    from anyformer.recipes.models import with_head

    base = anyformer.from_hf(str(tiny_checkpoint))
    base.config.num_labels = 1
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = with_head(base, base.config, "sequence_classification", seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = load_reward(str(tmp_path), batch_size=2)
    prompts = [[{"role": "user", "content": text}] for text in ("one two", "three", "four five six")]
    answers = ["the cat", "the dog sat on the log", "two"]
    expected = []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": answer}], tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        expected.append(model.eval()(ids).logits[0, 0].item())
    assert reward(prompts, answers) == pytest.approx(expected, abs=1e-5)


SIGNATURES = [
    ("prompts, completions, **columns", None),
    ("prompts, completions, *, answer, level, **columns", None),
    ("prompts, completions, answer, level", None),
    ("prompts, completions, *, answer, wanted=None, **columns", None),
    ("p, c, /, *, answer, **columns", None),
    ("*given, **columns", None),
    ("prompts, completions, *, wanted, **columns", "needs the column 'wanted', which the data lack; .*: answer, level"),
    ("prompts, completions, wanted, **columns", "needs the column 'wanted'"),
    ("prompts, completions, *, answer", r"does not take the column 'level': end its parameters with \*\*columns"),
    ("prompts, completions", "does not take the column 'answer'"),
    ("prompts, **columns", "must take the prompts and the completions"),
    ("level, completions, **columns", "takes 'level' as its own argument"),
]


@pytest.mark.parametrize(("parameters", "message"), SIGNATURES)
def test_a_signature_tells_which_columns_a_function_needs(tmp_path, parameters, message):
    """The function itself, called with these columns, agrees."""
    import re

    file = tmp_path / "f.py"
    file.write_text(f"def f({parameters}):\n    return [1.0]\n", encoding="utf-8")
    problem = column_problem(f"{file}:f", ["answer", "level"])
    call = load_reward(f"{file}:f")
    if message is None:
        assert problem is None and call(["p"], ["a"], answer=[1], level=[2]) == [1.0]
    else:
        assert re.search(message, problem)
        with pytest.raises((UserError, TypeError)):
            call(["p"], ["a"], answer=[1], level=[2])


def test_only_what_is_called_as_written_is_judged_by_what_is_written(tmp_path):
    file = tmp_path / "f.py"
    file.write_text("@wrap\ndef f(wanted):\n    ...\n", encoding="utf-8")
    assert column_problem(f"{file}:f", []) is None
    assert "needs the column 'answer', which the data lack; beside the prompt they have: none" in column_problem(
        "last-number", []
    )
    assert column_problem("some/model", ["answer"]) is None


def test_a_model_that_is_no_reward_model_is_found_by_its_config(tiny, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.nn.Module.load_state_dict", lambda *given, **named: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=r"objective\.reward .*/none: neither a local folder nor a Hub repository"):
        reward_model_config(str(tmp_path / "none"))
    with pytest.raises(
        UserError, match=r"holds LlamaForCausalLM, which is no reward model: give a sequence classifier"
    ):
        reward_model_config(str(tiny_checkpoint))
    for labels in (1, 2):
        model = tiny(head="sequence_classification", num_labels=labels, pad_token_id=0)
        model.save_pretrained(tmp_path / str(labels))
    assert reward_model_config(str(tmp_path / "1")).num_labels == 1
    with pytest.raises(UserError, match="has 2 labels; a reward model has one"):
        reward_model_config(str(tmp_path / "2"))
    with pytest.raises(UserError, match=r"a \.gguf file holds a language model"):
        reward_model_config("some/model.gguf")
    assert reward_model_config("pep257") is reward_model_config("stage:reward") is None


def test_a_reward_model_says_that_it_reads_the_ends_of_long_texts(tiny, tiny_checkpoint, tmp_path, caplog):
    model = tiny(head="sequence_classification", num_labels=1, vocab_size=320, max_position_embeddings=16)
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    reward = load_reward(str(tmp_path))
    with caplog.at_level("WARNING"):
        _, long = reward(["one", "one two three " * 9], [" two", " four"])
        reward(["one two three " * 9], [" four"])
    said = {id(record): record.getMessage() for record in caplog.records if "ends alone" in record.getMessage()}
    assert len(said) == 1 and "1 of these 2 texts are longer than the 16 tokens" in next(iter(said.values()))
    ids = tokenizer("one two three " * 9 + " four")["input_ids"] + [tokenizer.eos_token_id]
    with torch.no_grad():
        assert long == pytest.approx(model(torch.tensor([ids[-16:]])).logits.item(), abs=1e-5)
