"""The kinds of metrics: a kind is one file in this folder that defines `KIND`, and one line in `names.KINDS`."""

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from ..errors import UserError
from .names import KINDS, METRICS
from .score import Score
from .subject import Head, Subject

Row = dict[str, Any]
Tell = Callable[[str], None]
# The temperature at which several samples of a problem are drawn (Chen et al. 2021, arXiv:2107.03374, fig. 5).
HEAT = 0.8


@dataclass(frozen=True)
class Sampling:
    """How programs are sampled for pass@k.

    Attributes:
        samples: of each problem.
        k: the numbers of samples of which one has to pass.
        temperature: 0: the likeliest token each time; None: 0 for one sample, `HEAT` for several.
        allow_code: somebody has agreed that programs of the model are run.
    """

    samples: int = 1
    k: tuple[int, ...] = (1,)
    temperature: float | None = None
    seed: int = 0
    allow_code: bool = False

    @property
    def heat(self) -> float:
        """The temperature that is meant."""
        return self.temperature if self.temperature is not None else HEAT if self.samples > 1 else 0.0


@dataclass(frozen=True)
class Judge:
    """Who judges answers for the win rate.

    Attributes:
        reward: as a recipe names it in `objective.reward`.
        against: the model whose answers they are held against; None: the rows' own answers.
    """

    reward: str | None = None
    against: str | None = None


@dataclass(frozen=True)
class Settings:
    """What the command line says of how things are measured.

    Attributes:
        batch_size: rows, or windows of them, that go through the model together; no figure depends on it.
        max_new_tokens: the longest answer, in tokens.
        context: tokens of a window of a long text; None: the model's own length.
        stride: tokens by which windows go on; None: half a window.
        rows: "single": each text in a row of its own; "packed": several in one, which do not see each other.
    """

    batch_size: int = 8
    max_new_tokens: int = 256
    context: int | None = None
    stride: int | None = None
    rows: Literal["single", "packed"] = "single"
    sampling: Sampling = Sampling()
    judge: Judge = Judge()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Job(NamedTuple):
    """What a kind is given.

    Attributes:
        rows: in the canonical form of `format`, see `data.formats`.
        wanted: which of its metrics.
        tell: gets what a reader of the figures has to know, and how fast it went.
    """

    subject: Subject
    rows: Sequence[Row]
    format: str
    wanted: Sequence[str]
    settings: Settings
    tell: Tell


class Kind(NamedTuple):
    """A kind of metrics.

    Attributes:
        formats: head -> forms of rows that it measures such a model on.
        unasked: what is measured where the user names no metric.
        measure: raises `UserError` for rows or settings that it cannot use.
        check: the same for settings alone, before a model is opened.
    """

    formats: Mapping[Head, tuple[str, ...]]
    unasked: tuple[str, ...]
    measure: Callable[[Job], list[Score]]
    check: Callable[[Settings], None] | None = None


class Chosen(NamedTuple):
    """Some metrics of a kind."""

    kind: Kind
    wanted: tuple[str, ...]


def check_names(metrics: Sequence[str]) -> None:
    """Raises:
    UserError: a name that is no metric's.
    """
    for name in metrics:
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(METRICS)}"
            raise UserError(f"--metrics: {name!r} is none; {hint}")


def check_settings(metrics: Sequence[str], settings: Settings) -> None:
    """Before a model is opened.

    Raises:
        UserError: a metric cannot do with the settings, or there are some for a metric that is not asked for.
    """
    check_names(metrics)
    for file, names in KINDS.items():
        if metrics and not set(metrics) & set(names):
            continue
        kind = _kind(file)
        if kind.check and (metrics or kind.unasked):
            kind.check(settings)
    for given, unset, options, name in (
        (settings.sampling, Sampling(), "--samples, --k, --temperature, --seed and --allow-code", "pass@k"),
        (settings.judge, Judge(), "--reward and --against", "win-rate"),
    ):
        if given != unset and name not in metrics:
            raise UserError(f"{options} are for --metrics {name}, which is not asked for")


def _kind(file: str) -> Kind:
    return importlib.import_module(f".{file}", __package__).KIND


def choose(metrics: Sequence[str], head: Head) -> list[Chosen]:
    """The kinds to measure a model with such a head by.

    Args:
        metrics: by name; none: what is usual for the head.

    Raises:
        UserError: a name that is none, or a metric that such a model cannot have.
    """
    check_names(metrics)
    found: list[Chosen] = []
    others: dict[str, list[str]] = {}  # metric -> the heads that have it
    for file, names in KINDS.items():
        if metrics and not set(metrics) & set(names):
            continue
        kind = _kind(file)
        wanted = tuple(name for name in names if name in (metrics or kind.unasked))
        for name in wanted:
            others.setdefault(name, []).extend(kind.formats)
        if head in kind.formats and wanted:
            found.append(Chosen(kind, wanted))
    for name in metrics:
        if not any(name in chosen.wanted for chosen in found):
            *some, last = dict.fromkeys(others[name])
            heads = f"{', '.join(some)} or {last}" if some else last
            raise UserError(f"--metrics: {name}: is measured of a {heads}, and the model is a {head}")
    return found


def accepted(chosen: Sequence[Chosen], head: Head, asked: bool) -> tuple[str, ...]:
    """The forms of rows that all of them read, where the user asked for them; else that one of them reads.

    Raises:
        UserError: there is none.
    """
    each = [kind.formats[head] for kind, _ in chosen]
    every = list(dict.fromkeys(name for names in each for name in names))
    found = tuple(name for name in every if not asked or all(name in names for names in each))
    if not found:
        raise UserError("--metrics: no rows serve all of these: ask for them one by one")
    return found
