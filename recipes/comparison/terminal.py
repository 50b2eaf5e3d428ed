"""A comparison in the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..console import harmless
from .collect import Answers, Comparison
from .differences import Line
from .figures import Figure
from .wording import NOTE, SCORES_NOTE, difference_in_words, score_in_words, signed, title, value_in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(console: "Console", comparison: Comparison) -> None:
    """Print a comparison."""
    from rich.text import Text

    for remark in comparison.remarks:
        console.print(Text.assemble(("Note: ", "bold yellow"), f"{harmless(remark)}."))
    for figure in comparison.figures:
        console.print(_figure(figure, comparison.names))
    if comparison.figures:
        console.print(Text(NOTE, "dim"))
    else:
        console.print("No run has measured anything on held-out rows.")
    if comparison.scores:
        console.print(_scores(comparison))
        console.print(Text(SCORES_NOTE, "dim"))
    _show_lines(console, comparison, "what differs in the recipes", comparison.recipe, "No key of the recipes differs.")
    _show_lines(console, comparison, "what differs around them", comparison.environment, "")
    _show_lines(console, comparison, "what training took", comparison.training, "")
    for number, answers in enumerate(comparison.answers, 1):
        _show_answers(console, number, answers, comparison.names)


def _table(head: Sequence[str], heading: str) -> "Table":
    from rich.table import Column, Table
    from rich.text import Text

    first, *others = (Column(Text(harmless(name)), overflow="fold") for name in head)
    return Table(first, *others, title=Text(harmless(heading)), title_justify="left")


def _figure(figure: Figure, names: Sequence[str]) -> "Table":
    from rich.text import Text

    direction = {None: "", True: ", higher is better", False: ", lower is better"}[figure.higher_is_better]
    table = _table(("", "before", "after", "change", "difference"), title(figure.name) + direction)
    for name, cell in zip(names, figure.cells, strict=True):
        if cell is None:
            row = ["not measured", "", "", ""]
        else:
            row = [value_in_words(cell.before), value_in_words(cell.after), signed(cell.change)]
            row.append(difference_in_words(figure, cell))
        table.add_row(*(Text(harmless(text)) for text in (name, *row)))
    return table


def _scores(comparison: Comparison) -> "Table":
    from rich.text import Text

    table = _table(("", *comparison.names), "scores of anyformer eval")
    for score in comparison.scores:
        on = f" on {score.data}" if score.data else ""
        apart = f"; {score.apart}" if score.apart else ""
        about = f"{score.name}{on} ({score.better} is better{apart})"
        cells = (score_in_words(score, cell) for cell in score.cells)
        table.add_row(*(Text(harmless(text)) for text in (about, *cells)))
    return table


def _show_lines(
    console: "Console", comparison: Comparison, heading: str, lines: Sequence[Line], otherwise: str
) -> None:
    from rich.text import Text

    if not lines:
        if otherwise:
            console.print(otherwise)
        return
    table = _table(("", *comparison.names), heading)
    for key, values in lines:
        table.add_row(*(Text(harmless(text)) for text in (key, *values)))
    console.print(table)


def _show_answers(console: "Console", number: int, answers: Answers, names: Sequence[str]) -> None:
    from rich.text import Text

    console.print(Text(harmless(answers.prompt), "dim"))
    sides = [("in the data", answers.reference)]
    if answers.start is not None:
        sides.append(("before", answers.start))
    else:
        before = zip(names, answers.before, strict=True)
        sides += [(f"{name}, before", text) for name, text in before if text is not None]
    after = zip(names, answers.after, strict=True)
    sides += [(name, "not asked" if text is None else text) for name, text in after]
    table = _table([name for name, _ in sides], f"sample {number}")
    table.add_row(*(Text(harmless(text)) for _, text in sides))
    console.print(table)
