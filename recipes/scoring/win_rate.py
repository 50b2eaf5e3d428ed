"""How often a reward model prefers one answer to another, of two models or of a model and the data."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..data.formats import Unusable, prompt_of
from ..errors import UserError
from ..model_paths import check_there
from ..rewards import BUILT_IN, Reward, column_problem, load_reward, reward_model_config, reward_problem
from .answers import answers_of, encoded
from .intervals import interval, share_interval
from .kinds import Job, Kind, Settings
from .score import Score
from .statistics import ByRow
from .subject import open_subject

# Rewards that differ by no more may differ by the order of additions alone.
TIE = 1e-5


def own_answers(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[str]]:
    """Prompts, texts or messages, and the rows' own answers: `completion`, `chosen` of a preference, or what the
    assistant says last in `messages`.

    Raises:
        UserError: a row without either.
    """
    pairs = _pairs(rows)
    for number, (_, own) in enumerate(pairs, 1):
        if not own:
            raise UserError(f"win rate: row {number} has no answer of its own: give completion, chosen or messages")
    return [prompt for prompt, _ in pairs], [own for _, own in pairs if own]


def _pairs(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, str | None]]:
    """Prompts, and the rows' own answers where they have some."""
    found: list[tuple[Any, str | None]] = []
    for number, row in enumerate(rows, 1):
        given = dict(row)
        if isinstance(turns := row.get("messages"), list) and turns and turns[-1].get("role") == "assistant":
            given = {"prompt": turns[:-1], "completion": turns[-1:]}
        own = given.get("completion", given.get("chosen"))
        try:
            prompt = prompt_of(given)
        except Unusable as error:
            raise UserError(f"win rate: row {number} {error}") from error
        found.append((prompt, own if isinstance(own, str) or not own else own[-1]["content"]))
    return found


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
    by_row = ByRow.of_values([0.5 + ((margin > TIE) - (margin < -TIE)) / 2 for margin in margins])
    return Score.of("win rate", by_row, bounds=share_interval(points, len(margins)), details=details)


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
    with _in_words():
        given = load_reward(reward, batch_size=batch_size) if isinstance(reward, str) else reward
        scores = given.of([*prompts, *prompts], [*answers, *others], twice)
    return scores[: len(prompts)], scores[len(prompts) :]


@contextmanager
def _in_words() -> Iterator[None]:
    """Messages on a recipe's key, as the command line calls it."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("objective.reward", "--reward", 1)) from error


def check(settings: Settings) -> None:
    """Raises:
    UserError: no reward, one that cannot be used, or no model to be held against.
    """
    reward, against = settings.judge.reward, settings.judge.against
    if reward is None:
        raise UserError(
            f"--metrics win-rate needs --reward: a reward model, FILE.py:FUNCTION, or one of {', '.join(BUILT_IN)}"
        )
    if problem := reward_problem(reward):
        raise UserError(f"--reward: {problem}")
    with _in_words():
        reward_model_config(reward)
    if against is not None:
        check_there(against)


def measure(job: Job) -> list[Score]:
    """The win rate of greedy answers; where there is a second model, it is opened when the first one is gone.

    Raises:
        UserError: rows without prompts or answers of their own, columns that the reward cannot take, or a second model
            that writes nothing.
    """
    judge = job.settings.judge
    assert judge.reward is not None
    if judge.against is None:
        prompts, others = own_answers(job.rows)
    else:
        prompts, others = [prompt for prompt, _ in _pairs(job.rows)], []
    columns = _columns(job.rows)
    if problem := column_problem(judge.reward, list(columns)):
        raise UserError(f"--reward {judge.reward}: {problem}")
    answers, details = answers_of(job, encoded(job.subject.generator, prompts))
    job.subject.release()
    if judge.against is not None:
        others, of_others = _answers_of_other(job, judge.against, prompts)
        details["answers_of_others_cut"] = of_others["answers_cut"]
    score = win_rate(judge.reward, prompts, answers, others, columns=columns, batch_size=job.settings.batch_size)
    name = f"win rate over {judge.against or 'the data'} by {judge.reward}"
    return [replace(score, name=name, details=score.details | details)]


def _answers_of_other(job: Job, path: str, prompts: Sequence[Any]) -> tuple[list[str], dict[str, Any]]:
    other = open_subject(path, trust_remote_code=job.subject.trusted)
    if other.head not in KIND.formats:
        raise UserError(f"--against {path}: is a {other.head}, which writes no answers")
    try:
        return answers_of(job._replace(subject=other), encoded(other.generator, prompts))
    finally:
        other.release()


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What a reward gets beside prompt and answer; of a conversation its last message is the completion."""
    given = [
        {"completion": row["messages"][-1:]}
        if "messages" in row
        else {name: value for name, value in row.items() if name not in ("prompt", "tools")}
        for row in rows
    ]
    names = sorted({name for row in given for name in row})
    return {name: [row.get(name) for row in given] for name in names}


_READ = ("prompt-completion", "messages", "preference", "prompt")
KIND = Kind({"decoder": _READ, "encoder-decoder": _READ}, (), measure, check)
