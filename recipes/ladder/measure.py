"""The figures of all rungs: losses of the same held-out rows, and speeds taken in turns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...modeling.cache_sizes import measured_size
from ...modeling.counting import count
from ..errors import UserError
from ..evaluation import held_out_loss
from ..held_rows import HeldRows
from ..scoring.intervals import interval
from ..scoring.statistics import Statistic, ratio
from .rungs import PROMPT, WRITTEN, Rung

if TYPE_CHECKING:
    import torch

    from ..prepare import Prepared
    from ..stages import Pipeline

# Rounds in which every rung takes its turn; the median of a rung's is its figure.
ROUNDS = 5


@dataclass(frozen=True)
class Estimate:
    """A figure and the ends of its 95 % interval over held-out rows."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Speed:
    """Tokens a second, and the ratio to the first rung's; medians over rounds."""

    tokens: float
    ratio: float


@dataclass(frozen=True)
class Figures:
    """Of one rung.

    Attributes:
        parameters, active: of the model, and those that one token uses.
        rows: held out.
        loss: nats a token over all held-out rows.
        gain: loss of the parent less this one's on the same rows, with its paired interval; None of the first rung.
        train: of a forward and a backward pass. decode: of one text that is written greedily.
        cache: bytes of the cache behind `PROMPT + WRITTEN - 1` tokens, measured. cache_token: of one token, predicted.
    """

    name: str
    parent: str | None
    changes: dict[str, tuple[Any, Any]]
    about: str
    parameters: int
    active: int
    rows: int
    loss: Estimate
    gain: Estimate | None
    train: Speed
    decode: Speed
    cache: int
    cache_token: int

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss.value))

    def as_dict(self) -> dict[str, Any]:
        """Plain values; bounds that one row cannot give are None."""
        values = asdict(self) | {"perplexity": self.perplexity}
        for name in ("loss", "gain"):
            if values[name] is not None:
                values[name] = {key: None if np.isnan(number) else number for key, number in values[name].items()}
        return values


def measure(pipeline: "Pipeline", rungs: Sequence[Rung], say: Callable[[str], None]) -> list[Figures]:
    """All figures of trained rungs.

    Args:
        say: told what is measured next.

    Raises:
        UserError: no row is held out, or the rungs do not hold out the same rows.
    """
    from ..models import load_pretrained
    from ..prepare import prepare

    models: list[Any] = []
    kept: dict[str, HeldRows] = {}
    for rung in rungs:
        say(f"held-out loss of {rung.name}")
        prepared = prepare(pipeline.resolved(rung.stage))
        models.append(load_pretrained(str(rung.stage.folder)).eval())
        kept[rung.name] = _held_rows(rung, models[-1], prepared)
        if kept[rung.name].digests != kept[rungs[0].name].digests:
            raise UserError(
                f"stage {rung.name}: its held-out rows are not those of {rungs[0].name}: train all rungs anew"
            )
    losses = {name: np.asarray(rows.parts["loss"]) for name, rows in kept.items()}  # [rows, 2]: nats, tokens
    say("speeds, in turns")
    tokens = _batch(prepared)
    train = _in_turns([_training(model, tokens) for model in models])
    prompt = tokens[:1].repeat(1, -(-PROMPT // tokens.shape[1]))[:, :PROMPT]
    written = [_Writing(model, prompt) for model in models]
    decode = _in_turns(written)
    found = []
    for place, (rung, model) in enumerate(zip(rungs, models, strict=True)):
        counts, own = count(model.config), losses[rung.name]
        found.append(
            Figures(
                name=rung.name,
                parent=rung.parent,
                changes=rung.changes,
                about=rung.about,
                parameters=counts.total_parameters,
                active=counts.active_parameters,
                rows=len(own),
                loss=_estimate(own, ratio),
                gain=_estimate(np.concatenate([losses[rung.parent], own], 1), _difference) if rung.parent else None,
                train=_speed(tokens.numel(), train, place),
                decode=_speed(WRITTEN, decode, place),
                cache=written[place].cache,
                cache_token=counts.cache_bytes_per_token(4),
            )
        )
    return found


def _held_rows(rung: Rung, model: Any, prepared: "Prepared") -> HeldRows:
    if prepared.held_out is None:
        raise UserError(f"stage {rung.name}: no row is held out: set data.eval_fraction or data.eval_source")
    pad, size = prepared.tokenizer.pad_token_id, prepared.objective.recipe.eval.batch_size
    found = held_out_loss(model, prepared.held_out.dataset, pad_token_id=pad, batch_size=size).by_row
    assert found is not None, "losses are taken row by row"
    return found.in_order()


def _estimate(rows: np.ndarray, statistic: Statistic) -> Estimate:
    return Estimate(float(statistic(rows.sum(0))), *interval(rows, statistic))


def _difference(sums: np.ndarray) -> np.ndarray:
    """The loss of the first two columns less that of the last two."""
    return ratio(sums[..., :2]) - ratio(sums[..., 2:])


def _speed(tokens: int, seconds: np.ndarray, place: int) -> Speed:
    own = seconds[:, place]
    return Speed(float(np.median(tokens / own)), float(np.median(seconds[:, 0] / own)))


def _batch(prepared: "Prepared") -> "torch.Tensor":
    """The first held-out rows of full length, as many as a training step has: [rows, length]."""
    import torch

    assert prepared.held_out is not None, "its losses have been taken"
    rows = [row["input_ids"] for row in prepared.held_out.dataset]
    longest = max(map(len, rows))
    full = [row for row in rows if len(row) == longest][: prepared.arguments.per_device_train_batch_size]
    return torch.tensor([list(row) for row in full])


def _in_turns(works: Sequence[Callable[[], None]]) -> np.ndarray:
    """Seconds of each work, [rounds, works]; each has run once before."""
    for work in works:
        work()
    seconds = np.empty((ROUNDS, len(works)))
    for round_ in range(ROUNDS):
        for place, work in enumerate(works):
            begun = time.perf_counter()
            work()
            seconds[round_, place] = time.perf_counter() - begun
    return seconds


def _training(model: Any, tokens: "torch.Tensor") -> Callable[[], None]:
    """A forward and a backward pass in training mode, whose gradients are dropped."""

    def step() -> None:
        model.train()
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
        model.eval()

    return step


class _Writing:
    """Greedy generation of `WRITTEN` tokens behind a prompt; keeps the size of the last cache."""

    def __init__(self, model: Any, prompt: "torch.Tensor") -> None:
        self.model, self.prompt, self.cache = model, prompt, 0

    def __call__(self) -> None:
        import torch

        with torch.no_grad():
            output = self.model.generate(
                self.prompt,
                attention_mask=torch.ones_like(self.prompt),
                max_new_tokens=WRITTEN,
                min_new_tokens=WRITTEN,
                do_sample=False,
                return_dict_in_generate=True,
            )
        if output.sequences.shape[1] != PROMPT + WRITTEN:
            raise UserError(f"a text of {PROMPT + WRITTEN} tokens ended after {output.sequences.shape[1]}")
        self.cache = measured_size(output.past_key_values).held
