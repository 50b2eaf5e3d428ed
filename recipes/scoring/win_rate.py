"""How often a reward model prefers one answer to another, of two models or of a model and the data."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..data.formats import Unusable, prompt_of
from ..errors import UserError
from ..rewards import Reward, load_reward
from .intervals import interval, share_interval
from .score import Score

# Rewards that differ by no more may differ by the order of additions alone.
TIE = 1e-5


def own_answers(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[str]]:
    """Prompts, texts or messages, and the rows' own answers: `completion`, `chosen` of a preference, or what the
    assistant says last in `messages`.

    Raises:
        UserError: a row without either.
    """
    prompts: list[Any] = []
    answers: list[str] = []
    for number, row in enumerate(rows, 1):
        given = dict(row)
        if isinstance(turns := row.get("messages"), list) and turns and turns[-1].get("role") == "assistant":
            given = {"prompt": turns[:-1], "completion": turns[-1:]}
        own = given.get("completion", given.get("chosen"))
        try:
            prompts.append(prompt_of(given))
        except Unusable as error:
            raise UserError(f"win rate: row {number} {error}") from error
        if not own:
            raise UserError(f"win rate: row {number} has no answer of its own: give completion, chosen or messages")
        answers.append(own if isinstance(own, str) else own[-1]["content"])
    return prompts, answers


def win_rate(
    reward: str | Reward,
    prompts: Sequence[Any],
    answers: Sequence[str],
    others: Sequence[str],
    *,
    columns: Mapping[str, Sequence[Any]] | None = None,
    batch_size: int = 8,
) -> Score:
    """The share of prompts where `answers` get the higher reward than `others`; a tie counts one half.

    Args:
        reward: the folder or Hub id of a model of objective `reward`, or what else a recipe names in
            `objective.reward`.
        prompts: texts or messages.
        columns: of the rows, for a reward that reads them.

    Returns:
        Bounds are Wilson's, with ties as halves, which makes them rather too wide than too narrow. `details`: `wins`,
        `ties`, `losses`; `margin`, the mean difference of rewards, with `margin_low` and `margin_high`; and the mean
        numbers of characters of both sides, as reward models are known to like long answers
        (Singhal et al. 2023, arXiv:2310.03716).

    Raises:
        UserError: no prompt, other numbers of answers than prompts, or a reward that cannot be used.
    """
    if not prompts or not len(prompts) == len(answers) == len(others):
        raise UserError(
            f"win rate: there are {len(prompts)} prompts, and {len(answers)} and {len(others)} answers: each prompt "
            "needs one of either side"
        )
    first, second = _rewards(reward, prompts, answers, others, columns or {}, batch_size)
    texts = zip(answers, others, strict=True)
    # The same text in two batches is the same text.
    margins = [0.0 if a == b else x - y for (a, b), x, y in zip(texts, first, second, strict=True)]
    wins, losses = sum(margin > TIE for margin in margins), sum(margin < -TIE for margin in margins)
    ties = len(margins) - wins - losses
    points = wins + ties / 2
    low, high = share_interval(points, len(margins))
    margin_low, margin_high = interval(margins)
    details = {
        "wins": wins,
        "ties": ties,
        "losses": losses,
        "margin": sum(margins) / len(margins),
        "margin_low": margin_low,
        "margin_high": margin_high,
        "characters": sum(map(len, answers)) / len(answers),
        "characters_of_others": sum(map(len, others)) / len(others),
    }
    return Score("win rate", points / len(margins), low, high, len(margins), details=details)


def _rewards(
    reward: str | Reward,
    prompts: Sequence[Any],
    answers: Sequence[str],
    others: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    batch_size: int,
) -> tuple[list[float], list[float]]:
    """Of both sides, scored together, so that answers of like length share a batch."""
    twice = {name: [*values, *values] for name, values in columns.items()}
    try:
        given = load_reward(reward, batch_size=batch_size) if isinstance(reward, str) else reward
        scores = given.of([*prompts, *prompts], [*answers, *others], twice)
    except UserError as error:
        raise UserError(str(error).replace("objective.reward", "--reward", 1)) from error
    return scores[: len(prompts)], scores[len(prompts) :]
