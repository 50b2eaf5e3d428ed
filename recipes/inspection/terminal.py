"""An inspection in the terminal: readable without colour too, where what is learned stands between ⟦ and ⟧."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ..console import harmless
from ..tokens.views import MARKS, TokenSequence
from .collect import Inspection, Shown
from .pieces import NEWLINE, Gap, Piece, pieces, visible
from .wording import answers, edges_in_words, in_short, learned, repeats_in_words, row_title, stop_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from .statistics import Histogram

# Tokens of a sequence that are shown.
TOKENS = 160
_BAR = 36
_BORDER = "╎"  # between tokens, where colour does not tell them apart


def show(console: "Console", inspection: Inspection) -> None:
    """Print an inspection."""
    from rich.text import Text

    console.rule(Text(f"Data of {inspection.name}", "bold"))
    _print_lines(console, inspection.facts)
    for warning in inspection.warnings:
        console.print(Text.assemble(("Warning: ", "bold yellow"), warning))
    _show_figures(console, inspection)
    if found := repeats_in_words(inspection):
        console.rule(Text("Repeats", "bold"))
        _print_lines(console, [(f"{n:,}", f"{what}{f': {where}' if where else ''}") for what, n, where in found])
    console.rule(Text("Rows", "bold"))
    console.print(_legend(plain=_is_plain(console)))
    for shown in inspection.shown:
        _show_row(console, inspection, shown)


def _print_lines(console: "Console", lines: Sequence[tuple[str, str]]) -> None:
    """Names and values in two columns."""
    from rich.text import Text

    indent = max(len(name) for name, _ in lines) + 4
    for name, value in lines:
        wrapped = textwrap.wrap(harmless(value), max(console.width - indent, 20), break_on_hyphens=False) or [""]
        text = Text.assemble((f"{name:>{indent - 2}}", "bold"), "  ", f"\n{'':{indent}}".join(wrapped))
        console.print(text, soft_wrap=True)


def _is_plain(console: "Console") -> bool:
    return console.color_system is None or console.no_color


def _show_figures(console: "Console", inspection: Inspection) -> None:
    from rich.text import Text

    figures = inspection.train
    console.rule(Text("Figures", "bold"))
    if figures.looked_at < figures.rows:
        console.print(f"Of {figures.looked_at:,} of {figures.rows:,} rows, evenly spread.")
    for name, distribution in figures.lengths.items():
        console.print(Text.assemble((f"Length of {name}", "bold"), f", tokens: {in_short(distribution)}"))
        _show_bars(console, distribution.histogram, whole=True)
    console.print(Text.assemble(("Learned", "bold"), f": {learned(inspection)}"))
    if figures.shares:
        console.print("Rows by the share of their tokens that is learned:")
        _show_bars(console, figures.shares, percent=True)
    console.print(Text.assemble(("Stop token", "bold"), f": {stop_line(figures.stops)}"))
    if figures.pairs:
        console.print(Text.assemble(("Answers", "bold"), f": {answers(figures.pairs)}"))
    if figures.classes:
        console.print(Text("Classes", "bold"))
        most = figures.classes[0][1]
        for name, count in figures.classes[:20]:
            console.print(Text(f"{visible(name[:24]):>26} {_bar(count, most)}"))
        if len(figures.classes) > 20:
            console.print(f"{'':>26} and {len(figures.classes) - 20} more")
    if figures.values:
        console.print(Text.assemble(("Values", "bold"), f": {in_short(figures.values)}"))
        _show_bars(console, figures.values.histogram)


def _show_bars(console: "Console", histogram: "Histogram", *, whole: bool = False, percent: bool = False) -> None:
    from rich.text import Text

    most = max(histogram.counts)
    for words, count in zip(edges_in_words(histogram, whole=whole, percent=percent), histogram.counts, strict=True):
        console.print(Text(f"{words:>26} {_bar(count, most)}"))


def _bar(count: int, most: int) -> str:
    # Something is never shown as nothing.
    return f"{'█' * max(1, round(_BAR * count / most))} {count:,}" if count else "0"


# Rows


def _legend(*, plain: bool) -> "Text":
    from rich.text import Text

    legend = Text()
    for words, piece in (
        ("learned", Piece(0, 0, "learned", learned=True)),
        ("read, not learned", Piece(0, 0, "read, not learned")),
        ("special token", Piece(0, 0, "special token", special=True)),
    ):
        if not plain:
            legend.append(words, _style(piece, odd=False)).append("  ")
    marks = f"what is learned between {MARKS[0]} and {MARKS[1]}; · a space, ↵ a line break, → the label of a token"
    return legend.append(f"{marks}{f'; {_BORDER} between tokens' if plain else ''}")


def _show_row(console: "Console", inspection: Inspection, shown: Shown) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"\n{row_title(shown)}", "bold"))
    plain = _is_plain(console)
    for sequence in shown.view.sequences:
        for text in _sequence(sequence, inspection, plain=plain):
            console.print(text)
    if shown.view.beside:
        table = Table.grid(padding=(0, 2), expand=True)
        for _ in shown.view.beside:
            table.add_column(ratio=1, overflow="fold")
        columns = [Text("\n").join(_sequence(sequence, inspection, plain=plain)) for sequence in shown.view.beside]
        table.add_row(*columns)
        console.print(table)
    if shown.view.label:
        said = (f"{MARKS[0]}{visible(shown.view.label)}{MARKS[1]}", "" if plain else _LEARNED[0])
        console.print(Text.assemble("learned of the row: ", said))


_LEARNED = ("black on green", "black on bright_green")


def _style(piece: Piece, *, odd: bool) -> str:
    if piece.learned:
        return f"{'bold ' if piece.special else ''}{_LEARNED[odd]}"
    return ("bold magenta" if piece.special else "white") + (" on grey23" if odd else " on grey15")


def _sequence(sequence: TokenSequence, inspection: Inspection, *, plain: bool) -> "Iterator[Text]":
    """Lines of a sequence, under its name."""
    from rich.text import Text

    if sequence.name:
        yield Text(f"{sequence.name}, {len(sequence.ids):,} tokens", "underline")
    found = pieces(sequence, inspection.tokenizer, limit=TOKENS)
    documents = [place for place, piece in enumerate(found) if isinstance(piece, Piece) and piece.starts]
    bounds = [0, *documents, len(found)]
    text = Text(overflow="fold")
    for number_of, (start, end) in enumerate(pairwise(bounds), 1):
        if documents:
            text.append(f"{'' if number_of == 1 else chr(10)}--- document ---\n", "bold")
        text.append(_tokens(found[start:end], plain=plain))
    yield text


def _tokens(found: Sequence[Piece | Gap], *, plain: bool) -> "Text":
    from rich.text import Text

    text, on = Text(), False
    for place, piece in enumerate(found):
        if isinstance(piece, Gap):
            text.append(f"{MARKS[1] if on else ''} {piece.words} ")
            on = False
            continue
        if piece.learned != on:
            text.append(MARKS[piece.learned is False])
        elif plain and place and not isinstance(found[place - 1], Gap):
            text.append(_BORDER)
        on = piece.learned
        note = f"→{piece.note}" if piece.note else ""
        shown = piece.text if place + 1 == len(found) else piece.text.replace(NEWLINE, f"{NEWLINE}\n")
        text.append(shown + note, "" if plain else _style(piece, odd=bool(place % 2)))
    return text.append(MARKS[1] if on else "")
