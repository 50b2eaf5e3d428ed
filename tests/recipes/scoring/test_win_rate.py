from pathlib import Path
from typing import Any

import pytest

from anyformer.recipes.errors import UserError
from anyformer.recipes.scoring.intervals import interval, share_interval
from anyformer.recipes.scoring.win_rate import own_answers, win_rate

PROMPTS: list[Any] = [[{"role": "user", "content": text}] for text in ("one two", "three", "four five six", "six", "a")]
ANSWERS = ["the cat", "the dog sat on the log", "two", "cat", "log on the cat sat the dog"]
OTHERS = ["dog sat on the log the cat sat", "a", "three", "cat", "the"]


@pytest.fixture
def judge(tiny_checkpoint: Path, tmp_path: Path) -> tuple[Path, Any]:
    """A reward model with random weights: its folder, and the score of one text by itself."""
    import torch
    from transformers import AutoTokenizer

    import anyformer
    from anyformer.recipes.models import with_head

    base = anyformer.from_hf(str(tiny_checkpoint))
    base.config.num_labels = 1
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = with_head(base, base.config, "sequence_classification", seed=0).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def alone(prompt: list[dict[str, str]], answer: str) -> float:
        text = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": answer}], tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            return model(ids).logits[0, 0].item()

    return tmp_path, alone


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_it_counts_as_a_loop_over_single_texts_does(judge: tuple[Path, Any], batch_size: int) -> None:
    folder, alone = judge
    score = win_rate(str(folder), PROMPTS, ANSWERS, OTHERS, batch_size=batch_size)
    margins = [alone(p, a) - alone(p, b) for p, a, b in zip(PROMPTS, ANSWERS, OTHERS, strict=True)]
    wins, losses = sum(m > 1e-5 for m in margins), sum(m < -1e-5 for m in margins)
    assert min(abs(m) for m in margins if m) > 1e-3  # the choice does not hang on rounding
    assert (score.details["wins"], score.details["losses"], score.details["ties"]) == (wins, losses, 1)
    assert wins and losses
    assert score.value == (wins + 0.5) / 5
    assert (score.low, score.high) == share_interval(wins + 0.5, 5)
    assert score.details["margin"] == pytest.approx(sum(margins) / 5, abs=1e-5)
    assert (score.details["margin_low"], score.details["margin_high"]) == pytest.approx(interval(margins), abs=1e-5)
    assert score.details["characters_of_others"] == sum(map(len, OTHERS)) / 5
    turned = win_rate(str(folder), PROMPTS, OTHERS, ANSWERS, batch_size=batch_size)
    assert turned.value == pytest.approx(1 - score.value)


def test_a_function_may_judge(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text(
        "def near(prompts, completions, *, goal):\n    return [-abs(len(c) - g) for c, g in zip(completions, goal)]\n"
    )
    score = win_rate(
        f"{file}:near", ["p", "q", "r"], ["aa", "a", "aaa"], ["a", "aaa", "a"], columns={"goal": [2, 2, 5]}
    )
    assert (score.details["wins"], score.details["ties"], score.details["losses"]) == (2, 1, 0)
    assert score.value == pytest.approx(2.5 / 3)


def test_the_rows_own_answers() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": turns[:1], "completion": turns[1:]},
        {"messages": turns},
        {"prompt": turns[:1], "chosen": turns[1:], "rejected": turns[1:]},
    ]
    prompts, answers = own_answers(rows)
    assert prompts == ["q", turns[:1], turns[:1], turns[:1]]
    assert answers == ["a"] * 4
    for row, told in (({"prompt": "q"}, "row 1 has no answer of its own"), ({"text": "q"}, "row 1 has no `prompt`")):
        with pytest.raises(UserError, match=told):
            own_answers([row])


def test_mistakes_are_told(tiny_checkpoint: Path) -> None:
    with pytest.raises(UserError, match="2 prompts, and 1 and 2 answers"):
        win_rate("pep257", ["p", "q"], ["a"], ["a", "b"])
    with pytest.raises(UserError, match=r"^--reward: judge is no built-in reward"):
        win_rate("judge", ["p"], ["a"], ["b"])
    with pytest.raises(UserError, match=r"^--reward word-f1: raises TypeError"):
        win_rate("word-f1", ["p"], ["a"], ["b"])
