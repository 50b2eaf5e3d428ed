"""What is known of a run before a weight is loaded: data, tokens, adapter and plan."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapters.saved import SOFT_PROMPTS
from .errors import UserError
from .schema import OBJECTIVES, Recipe

if TYPE_CHECKING:
    from .adapters import AdapterPlan
    from .data import Splits
    from .objectives.base import Objective
    from .plan import Plan
    from .tokenize_sft import TokenizedData


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


def prepare(recipe: Recipe, opened: tuple[Any, Any, int] | None = None) -> Prepared:
    """Read the data, tokenise it, and plan the run.

    Args:
        opened: what `model_of` gave, where it has been asked already; it is not changed.

    Raises:
        UserError: data, tokenizer, config or adapter that cannot be used, or nothing that would be learned.
    """
    from .adapters import plan_adapter
    from .arguments import training_arguments
    from .data import load_splits
    from .objectives import objective_class
    from .plan import make_plan
    from .quantization import require_available, weights_plan

    entry = OBJECTIVES[recipe.objective.kind]
    assert entry.config is not None
    require_available(recipe.model.quantization)
    output = {"output_dir": str(Path(recipe.train["output_dir"]).expanduser())}
    arguments = training_arguments(entry.config, entry.defaults | recipe.train | output)
    config, tokenizer, rows = copy.deepcopy(opened) if opened else model_of(recipe, entry.shapes)
    kind = objective_class(recipe.objective.kind, config.architecture)
    objective = kind(recipe, arguments, config, tokenizer)
    _check_soft_prompt(recipe, objective)
    splits = load_splits(recipe.data, accepts=objective.formats)
    objective.configure(splits)
    train = objective.prepare(splits.train)
    held_out = objective.prepare(splits.eval) if splits.eval else None
    planned = copy.deepcopy(config)
    planned.vocab_size = rows
    adapter = plan_adapter(planned, recipe.adapter, objective)
    if adapter.trainable == 0:
        raise UserError("adapter: no parameter would be trained")
    sizes: dict[str, Any] = {"sequences": objective.sequences(train.report), "head": objective.head}
    quantized = weights_plan(planned, objective.head, recipe.model)
    sizes["weights"] = quantized.bytes
    sizes |= {"beside": objective.beside(), "passes": objective.passes}
    plan = make_plan(planned, recipe.model.dtype, adapter, arguments, train.report, **sizes)
    if plan.steps == 1 and arguments.get_warmup_steps(plan.steps) > 0:
        raise UserError(
            "train.warmup_steps: the first step of a warmup has learning rate 0 and the run has no other step, so "
            "nothing would be learned. Set train.warmup_steps=0"
        )
    lines = quantized.describe()
    return Prepared(objective, tokenizer, splits, train, held_out, arguments, config, plan, adapter, rows, lines)


def model_of(recipe: Recipe, shapes: tuple[str, ...]) -> tuple[Any, Any, int]:
    """Config and tokenizer, and the rows of the embedding that the adapter's folder asks for."""
    from .adapters import BadAdapterError, rows_needed
    from .models import config_and_tokenizer

    section, folder = recipe.model, recipe.adapter.path
    if folder and section.tokenizer is None and (Path(folder).expanduser() / "tokenizer_config.json").is_file():
        section = section.model_copy(update={"tokenizer": folder})  # with the tokens that were added for it
    try:
        longer = (lambda held: rows_needed(folder, held)) if folder else None
        config, tokenizer = config_and_tokenizer(section, shapes, longer)
        return config, tokenizer, longer(config.vocab_size) if longer else config.vocab_size
    except BadAdapterError as error:
        raise UserError(f"adapter.path: {error}") from error


def _check_soft_prompt(recipe: Recipe, objective: "Objective") -> None:
    """Raises:
    UserError: the model cannot have this soft prompt, or would be wrong with it.
    """
    from .soft_prompts import soft_prompt_problem

    kind, settings = recipe.adapter.kind, (objective.arguments, objective.options)
    if kind in SOFT_PROMPTS:
        packs = [getattr(where, name, None) for where in settings for name in ("packing", "padding_free")]
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
