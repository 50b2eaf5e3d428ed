"""From a recipe to all that is shown of its data."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..console import source_lines, split_rows, unstopped
from ..data.files import place
from ..errors import UserError
from ..prepare import Prepared, prepare
from .places import find_places
from .statistics import Pairs, Repeats, TokenFigures, repeats, token_figures
from .wording import share

if TYPE_CHECKING:
    from ..data import DataReport, Splits
    from ..objectives.base import Objective
    from ..schema import Recipe
    from ..tokens.report import TokenizationReport
    from ..tokens.views import RowView

# Figures are of so many rows, evenly spread, where there are more.
LOOKED_AT = 50_000
# Of more rows the first so many are compared with each other.
COMPARED = 500_000
# Files that are named.
_NAMED = 10
# Of so many pairs or more, a share of this size in which one length is chosen is told.
_ENOUGH, _TELLING = 20, 0.75


class Shown(NamedTuple):
    """A row to look at: its number, from 1, and why it was chosen."""

    number: int
    why: str
    view: "RowView"


@dataclass
class Inspection:
    """All that is shown of a recipe's data.

    Attributes:
        name: the recipe as it was named.
        facts: (name, value) of what was read, and what became of it.
        shown: the first rows, the longest, the shortest and, where rows are packed, the one with the most documents.
    """

    name: str
    kind: str
    model: str
    facts: list[tuple[str, str]]
    warnings: list[str]
    train: TokenFigures
    held_out: TokenFigures | None
    repeats: Repeats
    shown: list[Shown]
    tokenizer: Any
    report: "DataReport"
    tokenized: dict[str, "TokenizationReport"]
    places: dict[str, dict[int, str]]

    @property
    def tokens(self) -> int:
        """Tokens to train on, a prompt with two answers counted once where all rows were looked at."""
        all_seen = self.train.looked_at == self.train.rows
        return self.train.tokens if all_seen else self.tokenized["train"].tokens

    def named(self, number: int, *, held_out: bool = False) -> str:
        """A row as it was read, by its number and, where they are known, its file and line."""
        where = self.places["held_out" if held_out else "train"].get(number)
        return f"{number:,} ({where})" if where else f"{number:,}"

    def as_dict(self) -> dict[str, Any]:
        """The figures, and nothing of a row's text."""
        report = asdict(self.report)
        report["skipped"] = {"rows": self.report.rows_skipped, "causes": skip_causes(self.report)}
        figures = {"train": self.train, "held_out": self.held_out}
        places = {
            side: {str(number): where for number, where in sorted(found.items())} for side, found in self.places.items()
        }
        return {
            "recipe": self.name,
            "objective": self.kind,
            "model": self.model,
            "data": report,
            "rows": {side: asdict(tokens) for side, tokens in self.tokenized.items()},
            "tokens": {side: asdict(found) if found else None for side, found in figures.items()},
            "repeats": asdict(self.repeats) | {"places": places},
            "warnings": self.warnings,
        }


def inspect_recipe(
    recipe: "Recipe", name: str, *, rows: int = 3, opened: tuple[Any, Any, int] | None = None
) -> Inspection:
    """Read and tokenise the data of a recipe, and look at them.

    Args:
        name: what the recipe is called in what is shown.
        rows: how many of the first rows are shown.
        opened: what `prepare.model_of` gave, where it has been asked already.

    Raises:
        UserError: what `prepare` refuses.
    """
    prepared = prepare(recipe, opened)
    objective, data = prepared.objective, prepared.train.dataset
    packed = objective.training_rows(data)
    trained = data if packed is None else packed
    figures = _figures(objective, trained)
    held_out = prepared.held_out
    found = _repeats(prepared.splits)
    tokens = {"train": prepared.train.report} | ({"held_out": held_out.report} if held_out else {})
    warnings = [*prepared.splits.report.warnings, *prepared.train.report.warnings]
    if figures.pairs and (warning := given_away(figures.pairs)):
        warnings.append(warning)
    if figures.stops.checked:
        warnings = [*unstopped(prepared.train.report), *warnings]
    return Inspection(
        name=name,
        kind=recipe.objective.kind,
        model=recipe.model.path or f"a new {recipe.model.preset}",
        facts=[*_facts(recipe, prepared, figures), *_compared(found, prepared.splits.report)],
        warnings=warnings,
        train=figures,
        held_out=_figures(prepared.objective, held_out.dataset) if held_out else None,
        repeats=found,
        shown=_shown(objective, trained, figures, rows),
        tokenizer=prepared.tokenizer,
        report=prepared.splits.report,
        tokenized=tokens,
        places=_places(recipe, prepared.splits, found),
    )


def _repeats(splits: "Splits") -> Repeats:
    if hasattr(splits.train, "shards"):  # documents that are tokens already, as many as memory does not hold
        return Repeats()
    return repeats(islice(splits.train, COMPARED), splits.eval)


def _compared(found: Repeats, report: "DataReport") -> list[tuple[str, str]]:
    """How many rows were compared with each other, where that is not all of them."""
    if not found.looked_at:
        return [("compared", "no rows with each other: they are tokens already")]
    some = found.looked_at < report.rows_train
    return [("compared", f"the first {found.looked_at:,} rows with each other")] if some else []


def _places(recipe: "Recipe", splits: "Splits", found: Repeats) -> dict[str, dict[int, str]]:
    """Where the rows that are named as examples stand."""
    train, held = found.named
    report = splits.report
    sides = {
        "train": (splits.train, train, report.sources),
        "held_out": (splits.eval, held, report.eval_sources or report.sources),
    }
    places = {}
    for side, (rows, numbers, files) in sides.items():
        named = {number: row for number, row in enumerate(rows, 1) if number in numbers} if numbers else {}
        places[side] = find_places(named, files, recipe.data.columns)
    return places


def given_away(pairs: Pairs) -> str:
    """A warning where length tells most chosen answers from rejected ones, or nothing."""
    differing = pairs.shorter_chosen + pairs.longer_chosen
    if differing < _ENOUGH:
        return ""
    for which, count in (("shorter", pairs.shorter_chosen), ("longer", pairs.longer_chosen)):
        if count >= _TELLING * differing:
            return (
                f"the {which} answer is chosen in {share(count, differing)} of the {differing:,} pairs of unequal "
                "length: a model can be right by length alone"
            )
    return ""


def skip_causes(report: "DataReport") -> list[dict[str, Any]]:
    """Each cause for which rows were skipped, with their number and the place of the first."""
    counts = Counter(skipped.reason for skipped in report.skipped)
    first = {skipped.reason: skipped for skipped in reversed(report.skipped)}
    return [
        {"cause": cause, "rows": count, "first": place(first[cause].file, first[cause].line)}
        for cause, count in counts.most_common()
    ]


def _figures(objective: "Objective", dataset: Any) -> TokenFigures:
    from ..tokens.supervised import stop_ids

    try:
        stops = set(stop_ids(objective.tokenizer))
    except UserError:  # of a tokenizer that no answer is written with
        stops = set()

    @cache
    def is_blank(token: int) -> bool:
        return not objective.tokenizer.decode([token]).strip()

    return token_figures(_views(objective, dataset), len(dataset), stops=stops, is_blank=is_blank)


def _views(objective: "Objective", dataset: Any) -> Iterator[tuple[int, "RowView"]]:
    count = len(dataset)
    looked_at = range(count) if count <= LOOKED_AT else [n * count // LOOKED_AT for n in range(LOOKED_AT)]
    # A data set reads many rows at a time; what packs its rows when it is asked has only rows.
    rows = dataset.select(looked_at) if hasattr(dataset, "select") else (dataset[index] for index in looked_at)
    for index, row in zip(looked_at, rows, strict=True):
        yield index + 1, objective.view(row)


def _shown(objective: "Objective", dataset: Any, figures: TokenFigures, rows: int) -> list[Shown]:
    reasons = dict.fromkeys(range(1, min(rows, len(dataset)) + 1), "")
    chosen = {"the longest": figures.longest, "the shortest": figures.shortest, "the most documents": figures.fullest}
    for why, number in chosen.items():
        if number is not None:
            reasons[number] = ", ".join(filter(None, [reasons.get(number, ""), why]))
    return [Shown(number, why, objective.view(dataset[number - 1])) for number, why in reasons.items()]


def _facts(recipe: "Recipe", prepared: Prepared, figures: TokenFigures) -> list[tuple[str, str]]:
    report, tokens = prepared.splits.report, prepared.train.report
    facts = [
        ("model", recipe.model.path or f"a new {recipe.model.preset}"),
        ("objective", recipe.objective.kind),
        ("source", ", ".join([*report.sources[:_NAMED], *(["…"] if len(report.sources) > _NAMED else [])])),
        ("format", report.recognised),
        *(source_lines(report) if len(report.by_source) > 1 else []),
        ("read", f"{report.rows_read:,} rows; {report.rows_train:,} to train on, {report.rows_eval:,} held out"),
        ("held out", report.split),
        ("tokenised", f"{tokens.rows:,} rows, which make {tokens.rows_kept:,} rows of tokens"),
    ]
    if not figures.documents and figures.rows != tokens.rows_kept:
        facts.append(("first epoch", f"{figures.rows:,} rows, drawn by the weights of their sources"))
    if tokens.made:
        facts.append(("tokens", tokens.made))
    if figures.documents:
        facts.append(("packed", f"{figures.documents:,} documents in {figures.looked_at:,} rows"))
    limits = {name: found.limit for name, found in figures.lengths.items()}
    named = [f"{limit:,}" if name == "row" else f"{name} {limit:,}" for name, limit in limits.items()]
    facts.append(("max length", f"{', '.join(named)} tokens"))
    facts.append(("truncation", f"{prepared.objective.long_rows}; {tokens.truncated:,} cut{split_rows(tokens)}"))
    lost = {**tokens.dropped, **report.left_out}
    facts.append(("left out", "; ".join(f"{count:,} {cause}" for cause, count in lost.items()) or "none"))
    for cause in skip_causes(report):
        facts.append(("skipped", f"{cause['rows']:,}: {cause['cause']} (first: {cause['first']})"))
    if report.ignored_columns:
        facts.append(("not used", "columns " + ", ".join(report.ignored_columns)))
    return [*facts, *prepared.objective.plan_lines()]
