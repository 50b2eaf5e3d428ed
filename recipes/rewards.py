"""Rewards of policy optimisation: a trained reward model, or a Python function that verifies an answer.

A recipe names them in `objective.reward`: one of `BUILT_IN`, `FILE.py:FUNCTION`, or a model folder or Hub id. A
function is called as `function(prompts, completions, **columns)`: lists of equal length with the prompts as in the
data, the answers as text, and the data's other columns; it returns a number for each.
"""

import ast
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError

Scores = list[float]


def pep257(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> Scores:
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


def last_number(prompts: Sequence[Any], completions: Sequence[str], *, answer: Sequence[Any], **columns: Any) -> Scores:
    """1 where the last number of the text equals the column `answer`, else 0."""
    return [float(_number(text) == _number(str(right))) for text, right in zip(completions, answer, strict=True)]


def _number(text: str) -> float:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else math.nan  # equal to nothing


BUILT_IN: dict[str, Callable[..., Scores]] = {"pep257": pep257, "last-number": last_number}


def reward_problem(name: str) -> str | None:
    """Why a reward cannot be used, as far as can be told without running anything; or None."""
    if not name.strip():
        return "is empty: give a built-in reward, FILE.py:FUNCTION, or a model"
    file, colon, function = name.rpartition(":")
    if name in BUILT_IN or not (colon and file.endswith(".py")):
        return None
    try:
        tree = ast.parse(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"{file} is no Python: {error}"
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if function not in names:
        return f"{file} defines no function {function!r}; it has {', '.join(names) or 'none'}"
    return None


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
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        columns = {n: v for n, v in columns.items() if n not in _OF_THE_TRAINER}
        try:
            scores = [float(score) for score in self.score(list(prompts), texts, **columns)]
        except UserError:
            raise
        except Exception as error:  # somebody else's function: whatever it raises is told with its name
            raise UserError(f"objective.reward {self.name}: raises {type(error).__name__}: {error}") from error
        return checked_scores(self.name, scores, texts)


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


def load_reward(name: str, *, batch_size: int = 8) -> Reward:
    """The reward of that name.

    Raises:
        UserError: no such function or model.
    """
    if problem := reward_problem(name):
        raise UserError(f"objective.reward: {problem}")
    if name in BUILT_IN:
        return Reward(name, BUILT_IN[name])
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py"):
        return Reward(name, _function(Path(file).expanduser(), function))
    return Reward(name, RewardModel(name, batch_size=batch_size))


def _function(file: Path, name: str) -> Callable[..., Scores]:
    spec = importlib.util.spec_from_file_location(f"anyformer_reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # as above
        raise UserError(f"objective.reward: {file} raises {type(error).__name__}: {error}") from error
    function = getattr(module, name)
    if inspect.iscoroutinefunction(function):
        raise UserError(f"objective.reward: {file}:{name} is async; write a plain function")
    return function


class RewardModel:
    """The score of a sequence classifier with one label, as the objective `reward` trains it.

    Prompt and answer are rendered by the model's own chat template, the end of the turn included, and scored at the
    last real token.

    Args:
        path: a model folder or a Hub id.

    Raises:
        UserError: no model there, or one that does not give one number.
    """

    def __init__(self, path: str, *, batch_size: int = 8) -> None:
        from .models import load_pretrained, load_tokenizer_from, resolve_path

        self.model = load_pretrained(path, auto_class="AutoModelForSequenceClassification")
        self.tokenizer = load_tokenizer_from(resolve_path(path))
        self.batch_size = batch_size
        if self.model.config.num_labels != 1:
            raise UserError(
                f"objective.reward {path}: has {self.model.config.num_labels} labels; a reward model has one"
            )
        self.model.requires_grad_(False)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> Scores:
        import torch

        rows = self._encoded(prompts, completions)
        scores: Scores = []
        for start in range(0, len(rows), self.batch_size):
            batch = self.tokenizer.pad({"input_ids": rows[start : start + self.batch_size]}, padding_side="right")
            inputs = {n: torch.tensor(batch[n], device=self.model.device) for n in ("input_ids", "attention_mask")}
            with torch.no_grad():
                scores += self.model(**inputs).logits[:, 0].float().tolist()
        return scores

    def _encoded(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[list[int]]:
        from .tokenize_sft import tokenize_rows

        rows = []
        for prompt, text in zip(prompts, completions, strict=True):
            answer: Any = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            rows.append({"prompt": prompt, "completion": answer})
        longest = self.model.config.max_position_embeddings
        data = tokenize_rows(rows, self.tokenizer, max_length=None, loss_on="all").dataset["input_ids"]
        return [list(ids)[-longest:] for ids in data]
