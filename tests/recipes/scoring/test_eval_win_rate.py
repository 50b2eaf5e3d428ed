"""`anyformer eval --metrics win-rate`: one model against the rows, or against another model."""

import gc
import json
import weakref

import pytest
import torch
from eval_models import MODELS, PAIRS, save, write_rows
from typer.testing import CliRunner

from anyformer.recipes.generator import Generator
from anyformer.recipes.scoring import win_rate
from anyformer.recipes.scoring.intervals import share_interval
from anyformer.scripts.cli import app

CHATS = [
    {"prompt": [{"role": "user", "content": f"say {i}"}], "completion": [{"role": "assistant", "content": "A cat."}]}
    for i in range(4)
]
GIVEN = ("--metrics", "win-rate", "--max-new-tokens", 6)


def command(*given):
    return CliRunner().invoke(app, ["eval", *map(str, given)])


def refused(*given):
    result = command(*given)
    assert result.exit_code == 2, result.output
    return result.output


def score_of(*given):
    result = command(*given, *GIVEN, "--json")
    assert result.exit_code == 0, result.output
    (score,) = json.loads(result.stdout)["scores"]
    return score


@pytest.fixture
def longer(tmp_path):
    """A reward: the number of characters."""
    file = tmp_path / "judge.py"
    file.write_text("def longer(prompts, completions, **columns):\n    return [len(text) for text in completions]\n")
    return f"{file}:longer"


@pytest.fixture
def other(tiny, tmp_path):
    """A second model."""
    torch.manual_seed(1)
    return save(tiny(vocab_size=260), tmp_path / "other")


@pytest.fixture
def saying(monkeypatch):
    """A model's answers, said by its place in the order of opening."""

    def say(*texts):
        models = []

        def answer(self, prompts, max_new_tokens, **options):
            if not any(known is self.model for known in models):
                models.append(self.model)
            text = texts[[known is self.model for known in models].index(True)]
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return [[*ids, self.stops[0]] for _ in prompts]

        monkeypatch.setattr(Generator, "answer", answer)

    return say


@pytest.mark.parametrize(("text", "value"), [("a longer answer than the rows'", 1.0), ("A cat.", 0.5), ("x", 0.0)])
def test_answers_are_held_against_those_of_the_rows(tiny_checkpoint, tmp_path, longer, saying, text, value):
    on = write_rows(tmp_path / "rows.jsonl", CHATS)
    saying(text)
    score = score_of(tiny_checkpoint, "--on", on, "--reward", longer)
    assert score["name"] == f"win rate over the data by {longer}"
    assert (score["value"], score["count"]) == (value, 4)
    assert (score["low"], score["high"]) == pytest.approx(share_interval(value * 4, 4))
    assert score["details"]["characters_of_others"] == len("A cat.")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*CHATS[0]["prompt"], *CHATS[0]["completion"]]},
        {"prompt": "x", "chosen": "A cat.", "rejected": "no"},
        PAIRS[0],
    ],
    ids=["messages", "preference", "text"],
)
def test_every_form_with_an_answer_is_read(tiny_checkpoint, tmp_path, longer, saying, row):
    saying("a much longer answer")
    on = write_rows(tmp_path / "rows.jsonl", [row])
    assert score_of(tiny_checkpoint, "--on", on, "--reward", longer)["value"] == 1.0


def test_a_built_in_reward_gets_the_columns_that_it_reads(tiny_checkpoint, tmp_path, saying):
    saying("The answer is 4")
    rows = [
        {"prompt": "2 + 2", "completion": "5", "answer": "4"},
        {"prompt": "3 + 1", "completion": "4", "answer": "4"},
    ]
    on = write_rows(tmp_path / "rows.jsonl", rows)
    source = f"{{path: {on}, format: prompt}}"  # which keeps the other columns
    assert score_of(tiny_checkpoint, "--on", source, "--reward", "last-number")["value"] == 0.75
    assert "needs the column 'answer'" in refused(tiny_checkpoint, "--on", on, *GIVEN, "--reward", "last-number")


def test_two_models_answer_the_same_prompts(tiny_checkpoint, other, tmp_path, longer, saying):
    on = write_rows(tmp_path / "rows.jsonl", [{"prompt": row["prompt"]} for row in PAIRS])
    saying("the longer answer", "short")
    assert score_of(tiny_checkpoint, "--on", on, "--reward", longer, "--against", other)["value"] == 1.0
    saying("short", "the longer answer")
    score = score_of(tiny_checkpoint, "--on", on, "--reward", longer, "--against", other)
    assert score["value"] == 0.0 and score["name"] == f"win rate over {other} by {longer}"


def test_the_first_model_is_gone_when_the_second_is_opened(tiny_checkpoint, other, tmp_path, longer, monkeypatch):
    seen, real_open, real_answer = [], win_rate.open_subject, Generator.answer

    def answer(self, *given, **options):
        seen.append(weakref.ref(self.model))
        return real_answer(self, *given, **options)

    def opens(path, **options):
        gc.collect()
        assert seen and all(model() is None for model in seen)
        seen.append(path)
        return real_open(path, **options)

    on = write_rows(tmp_path / "rows.jsonl", [{"prompt": row["prompt"]} for row in PAIRS])
    monkeypatch.setattr(Generator, "answer", answer)
    monkeypatch.setattr(win_rate, "open_subject", opens)
    score = score_of(tiny_checkpoint, "--on", on, "--reward", longer, "--against", other)
    assert str(other) in seen
    assert score["details"]["wins"] + score["details"]["ties"] + score["details"]["losses"] == len(PAIRS)


def test_a_reward_model_judges(tiny, tiny_checkpoint, tmp_path):
    fields = MODELS["classifier"][0] | {"architecture": "decoder", "num_labels": 1, "position_embedding": "rope"}
    judge = save(tiny(head="sequence_classification", vocab_size=260, **fields), tmp_path / "judge")
    on = write_rows(tmp_path / "rows.jsonl", PAIRS)
    score = score_of(tiny_checkpoint, "--on", on, "--reward", judge)
    details = score["details"]
    assert score["value"] == (details["wins"] + details["ties"] / 2) / len(PAIRS)
    assert score["name"] == f"win rate over the data by {judge}"


@pytest.mark.parametrize("rows", [CHATS, PAIRS], ids=["messages", "text"])
def test_an_encoder_decoder_answers_too(tiny, tmp_path, longer, rows):
    fields, head = MODELS["encoder-decoder"]
    model = save(tiny(head=head, vocab_size=260, num_key_value_heads=4, **fields), tmp_path / "model")
    on = write_rows(tmp_path / "rows.jsonl", rows)
    assert score_of(model, "--on", on, "--reward", longer)["count"] == len(rows)


def test_mistakes_with_the_win_rate_are_told(tiny, tiny_checkpoint, tmp_path, longer):
    on = write_rows(tmp_path / "rows.jsonl", [{"prompt": "x"}])
    given = (tiny_checkpoint, "--on", on, *GIVEN)
    assert "--metrics win-rate needs --reward" in refused(*given)
    assert "--reward: pep is no built-in reward" in refused(*given, "--reward", "pep")
    assert "which is no reward model" in refused(*given, "--reward", tiny_checkpoint)
    assert "no such folder or file" in refused(*given, "--reward", longer, "--against", tmp_path / "none")
    assert "row 1 has no answer of its own" in refused(*given, "--reward", longer)
    assert "are for --metrics win-rate" in refused(tiny_checkpoint, "--on", on, "--reward", longer)
    fields, head = MODELS["classifier"]
    classifier = save(tiny(head=head, vocab_size=260, num_key_value_heads=4, **fields), tmp_path / "classifier")
    assert "--against" in (told := refused(*given, "--reward", longer, "--against", classifier))
    assert "which writes no answers" in told
