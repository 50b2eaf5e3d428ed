"""Rewards of policy optimisation: a trained reward model, or a Python function that verifies an answer.

A recipe names them in `objective.reward`: one of `BUILT_IN`, `FILE.py:FUNCTION`, or a model folder or Hub id. A
function is called as `function(prompts, completions, **columns)`: lists of equal length with the prompts as in the
data, the answers as text, and all other columns of the data; it returns a number for each.
"""

import ast
import copy
import inspect
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError
from .user_code import function_problem, functions_of, in_file, line_in, load_function, near
from .yaml_tree import STAGE

logger = logging.getLogger(__name__)
Scores = list[float]


def pep257(prompts: Sequence[Any], completions: Sequence[str], /, **columns: Any) -> Scores:
    """How far a docstring keeps to PEP 257: the share of five marks of a one-line summary.

    One line; ends in one period; begins with a capital letter; at most 72 characters; begins with an imperative, not
    with "This", "The", "A", "An", or a third person ("Returns").
    """
    return [_pep257(text.strip().strip('"').strip()) for text in completions]


def _pep257(text: str) -> float:
    first = text.split(" ", 1)[0]
    marks = (
        bool(text) and "\n" not in text,
        text.endswith(".") and not text.endswith("..") and ". " not in text,
        text[:1].isupper(),
        0 < len(text) <= 72,
        bool(first) and first not in ("This", "The", "A", "An") and not re.fullmatch(r"\w+[^s]s", first),
    )
    return sum(marks) / len(marks)


def last_number(
    prompts: Sequence[Any], completions: Sequence[str], /, *, answer: Sequence[Any], **columns: Any
) -> Scores:
    """1 where the last number of the text equals the column `answer`, else 0."""
    return [float(_number(text) == _number(str(right))) for text, right in zip(completions, answer, strict=True)]


def _number(text: str) -> float:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else math.nan  # equal to nothing


def word_f1(
    prompts: Sequence[Any], completions: Sequence[str], /, *, completion: Sequence[Any], **columns: Any
) -> Scores:
    """How many words a text shares with the row's own completion: their F1 (Rajpurkar et al. 2016, arXiv:1606.05250,
    sec. 6.1), without regard to case, punctuation and articles."""
    if None in completion:
        raise UserError(f"objective.reward word-f1: row {list(completion).index(None) + 1} has no `completion`")
    rights = [right if isinstance(right, str) else right[-1]["content"] for right in completion]
    return [_f1(_words(text), _words(right)) for text, right in zip(completions, rights, strict=True)]


def _words(text: str) -> Counter[str]:
    return Counter(word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the"))


def _f1(found: Counter[str], wanted: Counter[str]) -> float:
    total = found.total() + wanted.total()
    return 2 * (found & wanted).total() / total if total else 0.0


BUILT_IN: dict[str, Callable[..., Scores]] = {"pep257": pep257, "last-number": last_number, "word-f1": word_f1}


def reward_problem(name: str) -> str | None:
    """Why a reward cannot be used, as far as can be told without running anything; or None."""
    if not name.strip():
        return "is empty: give a built-in reward, FILE.py:FUNCTION, or a model"
    if name in BUILT_IN:
        return None
    place = (name, "") if name.endswith(".py") else in_file(name)
    if place is None:
        return None if _may_be_a_model(name) else _no_built_in(name)
    return function_problem(*place)


def _may_be_a_model(name: str) -> bool:
    """Whether a name is that of a file, a folder, a stage or a package, or has the owner that ids of the Hub have."""
    return "/" in name or ":" in name or name.endswith(".gguf") or Path(name).expanduser().exists()


def _no_built_in(name: str) -> str:
    known = ", ".join(BUILT_IN)
    return (
        f"{name} is no built-in reward ({known}), no folder here and no OWNER/MODEL of the Hub; a function is given as "
        f"FILE.py:FUNCTION{near(name, BUILT_IN)}"
    )


def column_problem(name: str, columns: Sequence[str]) -> str | None:
    """Why a reward cannot be called with the data's columns, as far as its signature tells; or None.

    Args:
        columns: names of all columns but the prompt.
    """
    if place := in_file(name):
        node = functions_of(place[0]).get(place[1])
        if node is None or node.decorator_list:  # what is called may take others than what is written
            return None
        given = _signature(node)
    elif name in BUILT_IN:
        given = inspect.signature(BUILT_IN[name])
    else:
        return None  # a model reads prompt and answer
    kinds = inspect.Parameter
    parameters = list(given.parameters.values())
    by_place = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if len(by_place) < 2 and not any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        return "must take the prompts and the completions: write def f(prompts, completions, **columns)"
    by_name = [p for p in parameters if p not in by_place[:2]]
    known = ", ".join(columns) or "none"
    for parameter in by_name:
        plain = parameter.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if plain and parameter.default is kinds.empty and parameter.name not in columns:
            return f"needs the column {parameter.name!r}, which the data lack; beside the prompt they have: {known}"
    for column in columns:
        if column in [p.name for p in by_place[:2] if p.kind is kinds.POSITIONAL_OR_KEYWORD]:
            return f"takes {column!r} as its own argument, and the data have a column of that name: rename one of them"
    other = [column for column in columns if column not in [p.name for p in by_name]]
    if other and not any(p.kind is kinds.VAR_KEYWORD for p in parameters):
        return f"does not take the column {other[0]!r}: end its parameters with **columns"
    return None


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    """The signature of a function that is not run; a default counts, whatever it is."""
    kinds, given = inspect.Parameter, node.args
    places: list[tuple[str, Any]] = [(a.arg, kinds.POSITIONAL_ONLY) for a in given.posonlyargs]
    places += [(a.arg, kinds.POSITIONAL_OR_KEYWORD) for a in given.args]
    required = len(places) - len(given.defaults)
    made = [kinds(name, kind, default=kinds.empty if i < required else None) for i, (name, kind) in enumerate(places)]
    if given.vararg:
        made.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        made.append(kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if given.kwarg:
        made.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(made)


def reward_model_config(name: str) -> Any:
    """The config of the reward model that a recipe names, looked at before a weight is loaded.

    Returns:
        None where the name is that of a function, or of a stage whose model is not trained yet.

    Raises:
        UserError: no model there, or none that gives one number.
    """
    from ..modeling.interop import ConversionError
    from ..modeling.interop.source import open_source
    from .model_paths import resolve_path

    if name in BUILT_IN or in_file(name) or name.startswith(STAGE):
        return None
    here = f"objective.reward {name}"
    remedy = "give a sequence classifier with one label, as objective: {kind: reward} trains it"
    where = resolve_path(name)
    if where.endswith(".gguf"):
        raise UserError(f"{here}: a .gguf file holds a language model, which gives no score: {remedy}")
    try:
        source = open_source(where)
    except ConversionError as error:
        raise UserError(f"{here}: {error}") from error
    held = source.stock_class
    if held is None or not held.endswith("ForSequenceClassification"):
        raise UserError(f"{here}: holds {held or 'a model of no named class'}, which is no reward model: {remedy}")
    if source.config.num_labels != 1:
        raise UserError(f"{here}: has {source.config.num_labels} labels; a reward model has one: {remedy}")
    return source.config


class Reward:
    """One reward under its name.

    Args:
        name: as the recipe gives it.
        score: the function behind it.

    Raises:
        UserError: when called, if the function does not give a finite number for each answer.
    """

    def __init__(self, name: str, score: Callable[..., Scores]) -> None:
        self.name, self.score = name, score
        # TRL logs a reward under this.
        self.__name__ = Path(name).name.replace(":", ".")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Scores:
        """As a trainer calls it, with what it passes beside the columns."""
        return self.of(prompts, completions, {n: v for n, v in columns.items() if n not in _OF_THE_TRAINER})

    def of(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Scores:
        """The scores of completions, given columns of any names."""
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        # Copies, as a function may change what it is given.
        given = {name: copy.deepcopy(list(values)) for name, values in columns.items()}
        try:
            found: Any = self.score(copy.deepcopy(list(prompts)), list(texts), **given)
            scores = [float(score) for score in _numbers(self.name, found)]
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # somebody else's function: whatever it raises is told with its name
            place = in_file(self.name)
            line = line_in(Path(place[0]).expanduser(), error) if place else ""
            raise UserError(f"objective.reward {self.name}: raises {type(error).__name__}: {error}{line}") from error
        return checked_scores(self.name, scores, texts)


def _numbers(name: str, found: Any) -> list[Any]:
    """What a function returned, as a list without a None in it."""
    if found is None:
        raise UserError(f"objective.reward {name}: returns None instead of a list of numbers")
    numbers = list(found)
    if missing := sum(number is None for number in numbers):
        raise UserError(
            f"objective.reward {name}: gives None for {missing} of {len(numbers)} answers: each needs a number"
        )
    return numbers


class RewardOfRows:
    """A reward as a trainer calls it whose data set holds no columns but `ROW`, the number of each row.

    The columns stay what they are in the data; a data set of Arrow would hold one type in each, and all keys of any
    object in every one.

    Args:
        reward: called with the columns.
        rows: those that the numbers count.
        columns: names of all columns; a row without one gives None.
    """

    def __init__(self, reward: Reward, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
        self.reward, self.rows, self.columns = reward, rows, columns
        self.__name__ = reward.__name__

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **given: Any) -> Scores:
        rows = [self.rows[number] for number in given[ROW]]
        return self.reward.of(prompts, completions, {n: [row.get(n) for row in rows] for n in self.columns})


def checked_scores(name: str, scores: Sequence[float], texts: Sequence[str]) -> Scores:
    """Scores as they are.

    Raises:
        UserError: not one finite number for each text.
    """
    if len(scores) != len(texts):
        raise UserError(f"objective.reward {name}: gives {len(scores)} numbers for {len(texts)} answers")
    for score, text in zip(scores, texts, strict=True):
        if not math.isfinite(score):
            raise UserError(f"objective.reward {name}: gives {score} for {text!r}, which is no finite number")
    return list(scores)


# What TRL passes beside the columns.
_OF_THE_TRAINER = ("trainer_state", "log_extra", "log_metric", "completion_ids", "environments")
# The column of a policy's data set with the number of the row that it comes from.
ROW = "row_number"


def load_reward(name: str, *, batch_size: int = 8) -> Reward:
    """The reward of that name.

    Raises:
        UserError: no such function or model.
    """
    if problem := reward_problem(name):
        raise UserError(f"objective.reward: {problem}")
    if name in BUILT_IN:
        return Reward(name, BUILT_IN[name])
    if place := in_file(name):
        return Reward(name, load_function(Path(place[0]).expanduser(), place[1], "objective.reward"))
    return Reward(name, RewardModel(name, batch_size=batch_size))


class RewardModel:
    """The score of a sequence classifier with one label, as the objective `reward` trains it.

    Prompt and answer are rendered by the model's own chat template, the end of the turn included, and scored at the
    last real token. Of texts beyond the model's trained length the end alone is read, and the first time that is said.

    Args:
        path: a model folder or a Hub id.

    Raises:
        UserError: no model there, or one that does not give one number.
    """

    def __init__(self, path: str, *, batch_size: int = 8) -> None:
        from .model_paths import resolve_path
        from .models import load_pretrained, load_tokenizer_from

        self.path, self.cuts = path, False
        self.model = load_pretrained(path, auto_class="AutoModelForSequenceClassification")
        self.tokenizer = load_tokenizer_from(resolve_path(path))
        self.batch_size = batch_size
        if self.model.config.num_labels != 1:
            raise UserError(
                f"objective.reward {path}: has {self.model.config.num_labels} labels; a reward model has one"
            )
        self.model.requires_grad_(False)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], /, **columns: Any) -> Scores:
        import torch

        rows = self._encoded(prompts, completions)
        scores = [0.0] * len(rows)
        # Rows of like length share a batch, so that little is padded.
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        for start in range(0, len(order), self.batch_size):
            indices = order[start : start + self.batch_size]
            batch = self.tokenizer.pad({"input_ids": [rows[index] for index in indices]}, padding_side="right")
            inputs = {n: torch.tensor(batch[n], device=self.model.device) for n in ("input_ids", "attention_mask")}
            with torch.no_grad():
                found = self.model(**inputs).logits[:, 0].float().tolist()
            for index, score in zip(indices, found, strict=True):
                scores[index] = score
        return scores

    def _encoded(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[list[int]]:
        from .tokens.supervised import tokenize_rows

        rows = []
        for prompt, text in zip(prompts, completions, strict=True):
            answer: Any = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            rows.append({"prompt": prompt, "completion": answer})
        longest = self.model.config.max_position_embeddings
        data = tokenize_rows(rows, self.tokenizer, max_length=None, loss_on="all").dataset["input_ids"]
        if (cut := sum(len(ids) > longest for ids in data)) and not self.cuts:
            self.cuts = True
            logger.warning(
                "reward model %s: %d of these %d texts are longer than the %d tokens that it was trained for. It reads "
                "their ends alone, here and from now on",
                self.path,
                cut,
                len(rows),
                longest,
            )
        return [list(ids)[-longest:] for ids in data]
