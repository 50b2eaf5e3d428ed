"""What is known of a run before a weight is loaded: data, tokens, adapter and plan."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapters.bases import check_vocabulary
from .adapters.saved import SOFT_PROMPTS
from .errors import Gathered, UserError
from .schema import OBJECTIVES, Recipe

if TYPE_CHECKING:
    from .adapters import AdapterPlan
    from .data import Splits
    from .objectives.base import Objective
    from .planning import Plan
    from .tokens.report import TokenizedData


@dataclass
class Prepared:
    """All that is known before a weight is loaded.

    Attributes:
        rows: of the model's embedding once an adapter that the run goes on from has its tokens.
        quantized: (name, value) lines on quantised weights.
    """

    objective: "Objective"
    tokenizer: Any
    splits: "Splits"
    train: "TokenizedData"
    held_out: "TokenizedData | None"
    arguments: Any
    config: Any
    plan: "Plan"
    adapter: "AdapterPlan"
    rows: int
    quantized: list[tuple[str, str]]

    @property
    def data_digest(self) -> str:
        """Of all rows, in their order, and of the code that made them: a run that goes on must have the same."""
        return self.splits.digest


def prepare(recipe: Recipe, opened: tuple[Any, Any, int] | None = None) -> Prepared:
    """Read the data, tokenise it, and plan the run.

    Args:
        opened: what `model_of` gave, where it has been asked already; it is not changed.

    Raises:
        UserError: data, tokenizer, config or adapter that cannot be used, or nothing that would be learned.
    """
    from .data import load_splits
    from .objectives import objective_class
    from .quantization import require_available, weights_plan

    found, objective, splits, adapter, train, rows = Gathered(), None, None, None, None, 0
    with found.step():
        require_available(recipe.model.quantization)
    with found.step():
        objective, rows = _objective_of(recipe, opened)
    with found.step():
        splits = load_splits(recipe.data, accepts=(objective or objective_class(recipe.objective.kind)).formats)
    if objective is not None:
        with found.step():
            if splits is not None:
                objective.configure(splits)
                train = objective.prepare_training(splits)
                held_out = _held_out(objective, splits)
        with found.step():
            _check_soft_prompt(recipe, objective)
            adapter = _adapter_of(objective, rows)
    found.tell()
    assert objective is not None and splits is not None and train is not None and adapter is not None
    config, arguments, tokenizer = objective.config, objective.arguments, objective.tokenizer
    quantized = weights_plan(_with_rows(config, rows), objective.head, recipe.model)
    plan = _plan_of(recipe, objective, adapter, train, quantized.bytes, rows)
    lines = quantized.describe()
    return Prepared(objective, tokenizer, splits, train, held_out, arguments, config, plan, adapter, rows, lines)


def _held_out(objective: "Objective", splits: "Splits") -> "TokenizedData | None":
    try:
        return objective.prepare(splits.eval) if splits.eval else None
    except UserError as error:
        raise UserError(f"held-out rows: {error}") from error


def _objective_of(recipe: Recipe, opened: tuple[Any, Any, int] | None) -> tuple["Objective", int]:
    """The objective on the trainer's arguments and the model's config, and the rows of the model's embedding."""
    from .arguments import training_arguments
    from .objectives import objective_class

    entry = OBJECTIVES[recipe.objective.kind]
    assert entry.config is not None
    output = {"output_dir": str(Path(recipe.train["output_dir"]).expanduser())}
    arguments = training_arguments(entry.config, entry.defaults | recipe.train | output)
    config, tokenizer, rows = copy.deepcopy(opened) if opened else model_of(recipe, entry.shapes)
    return objective_class(recipe.objective.kind, config.architecture)(recipe, arguments, config, tokenizer), rows


def _adapter_of(objective: "Objective", rows: int) -> "AdapterPlan":
    """What is trained, on a model with so many rows in its embedding."""
    adapter = objective.plan_of(_with_rows(objective.config, rows))
    if adapter.trainable == 0:
        raise UserError("adapter: no parameter would be trained")
    return adapter


def _plan_of(
    recipe: Recipe, objective: "Objective", adapter: "AdapterPlan", train: "TokenizedData", weights: int, rows: int
) -> "Plan":
    """Steps, memory and time.

    Args:
        weights: bytes of the base's weights.
        rows: of the model's embedding.

    Raises:
        UserError: the only step would have learning rate 0, or the phases of a schedule are not as long as the run.
    """
    from .planning import make_plan

    arguments, sequences = objective.arguments, objective.sequences(train)
    sizes: dict[str, Any] = {"sequences": sequences, "head": objective.head, "weights": weights}
    sizes |= {"beside": objective.beside(), "passes": objective.passes, "flops_a_token": objective.flops_a_token}
    config = _with_rows(objective.config, rows)
    plan = make_plan(config, recipe.model.dtype, adapter, arguments, train.report, **sizes)
    _check_schedule(arguments, plan.steps)
    if plan.steps == 1 and arguments.get_warmup_steps(plan.steps) > 0:
        raise UserError(
            "train.warmup_steps: the first step of a warmup has learning rate 0 and the run has no other step, so "
            "nothing would be learned. Set train.warmup_steps=0"
        )
    return plan


def _check_schedule(arguments: Any, steps: int) -> None:
    if arguments.lr_scheduler_type != "warmup_stable_decay":
        return
    given, warmup = arguments.lr_scheduler_kwargs or {}, arguments.get_warmup_steps(steps)
    decay, stable = given["num_decay_steps"], given.get("num_stable_steps")
    phases = f"{warmup} steps of warmup and {decay} of decay"
    if stable is not None and warmup + stable + decay != steps:
        raise UserError(
            f"train.lr_scheduler_kwargs: {phases} with {stable} stable ones are not the {steps} of the run, and behind "
            "its phases the schedule stays at its least: leave num_stable_steps out"
        )
    if warmup + decay > steps:
        raise UserError(f"train.lr_scheduler_kwargs: {phases} are more than the {steps} of the run: lower one of them")


def _with_rows(config: Any, rows: int) -> Any:
    """A config whose embedding has so many rows."""
    planned = copy.deepcopy(config)
    planned.vocab_size = rows
    return planned


def model_of(recipe: Recipe, shapes: tuple[str, ...]) -> tuple[Any, Any, int]:
    """Config and tokenizer, and the rows of the embedding that the adapter's folder asks for."""
    from .adapters import BadAdapterError, rows_needed
    from .models import config_and_tokenizer

    section, folder = recipe.model, recipe.adapter.path
    if folder and section.tokenizer is None and (Path(folder).expanduser() / "tokenizer_config.json").is_file():
        section = section.model_copy(update={"tokenizer": folder})  # with the tokens that were added for it
    try:
        longer = (lambda held: rows_needed(folder, held)) if folder else None
        config, tokenizer = config_and_tokenizer(section, shapes, longer, lambda: _training_texts(recipe))
        if folder:
            check_vocabulary(folder, config.vocab_size)
        return config, tokenizer, longer(config.vocab_size) if longer else config.vocab_size
    except BadAdapterError as error:
        raise UserError(f"adapter.path: {error}") from error


def _training_texts(recipe: Recipe) -> Iterator[str]:
    """The texts of the training rows, for a tokenizer that is learned from them.

    Raises:
        UserError: the rows are of another form than texts, sources and targets, or plain prompts and completions.
    """
    from .data import load_splits
    from .objectives import objective_class
    from .shards.splits import names_shards

    if names_shards(recipe.data):
        raise UserError("model.tokenizer: token shards have their tokenizer: name the folder `tokenizer` in theirs")
    for row in load_splits(recipe.data, accepts=objective_class(recipe.objective.kind).formats).train:
        found = [row[name] for name in ("text", "source", "target") if isinstance(row.get(name), str)]
        if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
            found = [row["prompt"] + row["completion"]]  # as they are tokenised
        if not found:
            raise UserError(
                f"model.tokenizer: {recipe.model.tokenizer} is learned from rows of text, of source and target or of "
                f"plain prompt and completion; these hold {', '.join(sorted(row))}. Name a tokenizer that exists"
            )
        yield from found


def _check_soft_prompt(recipe: Recipe, objective: "Objective") -> None:
    """Raises:
    UserError: the model cannot have this soft prompt, or would be wrong with it.
    """
    from .soft_prompts import soft_prompt_problem

    kind, settings = recipe.adapter.kind, (objective.arguments, objective.options)
    if kind in SOFT_PROMPTS:
        packs = [getattr(where, "packing", None) for where in settings]
        problem = soft_prompt_problem(
            objective.config,
            kind,
            head=objective.head,
            virtual_tokens=recipe.adapter.virtual_tokens,
            max_length=objective.behind_soft_prompt,
            packed=any(value not in (None, False, "none") for value in packs),
        )
        if problem:
            raise UserError(f"adapter.kind: {kind}: {problem}")
