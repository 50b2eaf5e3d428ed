"""An inspection as one HTML page."""

from pathlib import Path
from typing import Any

from ..pages import render_page, save_page
from . import charts
from .collect import Inspection, Shown
from .pieces import Gap, Piece, pieces
from .statistics import TokenFigures
from .wording import answers, in_short, learned, number, repeats_in_words, row_title, share

# Tokens of a sequence that are shown.
TOKENS = 2000
_LEGEND = (
    Piece(0, 0, "learned", learned=True),
    Piece(0, 0, "read, not learned"),
    Piece(0, 0, "special", special=True),
    Piece(0, 0, "special, learned", learned=True, special=True),
)


def write_page(inspection: Inspection, file: Path) -> None:
    """Write the page.

    Raises:
        UserError: the file cannot be written.
    """
    save_page(render(inspection), file)


def render(inspection: Inspection) -> str:
    """The page as text. All that comes out of the data is escaped."""
    return render_page(
        __package__,
        inspection=inspection,
        tiles=_tiles(inspection),
        pictures=_pictures(inspection),
        sides=_sides(inspection),
        repeats=repeats_in_words(inspection),
        rows=[_row(inspection, shown) for shown in inspection.shown],
        legend=_LEGEND,
    )


def _tiles(inspection: Inspection) -> list[tuple[str, str, str]]:
    """(figure, what it is, whether it is good to know or alarming) of the most telling figures."""
    train, found = inspection.train, inspection.repeats
    tiles = [
        (number(train.rows), "packed rows to train on" if train.documents else "rows to train on", ""),
        (number(inspection.held_out.rows if inspection.held_out else 0), "rows held out", ""),
        (number(inspection.tokens), "tokens", ""),
    ]
    if train.supervised:
        tiles.append((share(train.supervised, train.tokens), "of them learned", ""))
    if train.stops.checked:
        alarm = "" if train.stops.stopped == train.stops.checked else "warn"
        tiles.append((share(train.stops.stopped, train.stops.checked), "of answers end in a stop token", alarm))
    if found.looked_at:
        tiles.append((number(found.repeated), "rows repeat another", "warn" if found.repeated else ""))
    return tiles


def _pictures(inspection: Inspection) -> list[charts.Picture]:
    figures = inspection.train
    pictures = [charts.lengths(name, found, in_short(found)) for name, found in figures.lengths.items()]
    if figures.shares:
        pictures.append(
            charts.histogram(
                "Share that is learned", learned(inspection), [figures.shares], unit="% of a row's tokens", percent=True
            )
        )
    if figures.pairs:
        pictures.append(charts.pairs(figures.pairs, answers(figures.pairs)))
    if figures.classes:
        caption = f"{len(figures.classes):,} classes, {sum(count for _, count in figures.classes):,} labels"
        pictures.append(charts.named_bars("Classes", caption, figures.classes))
    if figures.values:
        pictures.append(
            charts.histogram("Values", in_short(figures.values), [figures.values.histogram], unit="value to predict")
        )
    return pictures


def _sides(inspection: Inspection) -> list[tuple[str, list[str]]]:
    """What training and held-out rows are compared in: (what, value of each side)."""
    sides = [inspection.train, *([inspection.held_out] if inspection.held_out else [])]
    lines = [
        ("rows", [number(side.rows) for side in sides]),
        ("tokens", [number(side.tokens) for side in sides]),
    ]
    if inspection.train.supervised:
        lines.append(("learned", [share(side.supervised, side.tokens) for side in sides]))
    for name in inspection.train.lengths:
        what = "tokens a row" if name == "row" else f"tokens of {name}"
        lines.append((f"{what}: mean", [number(side.lengths[name].mean) for side in sides]))
        lines.append((f"{what}: most", [number(side.lengths[name].largest) for side in sides]))
    if inspection.train.stops.checked:
        lines.append(("end in a stop token", [share(s.stops.stopped, s.stops.checked) for s in sides]))
    if inspection.train.pairs:
        lines.append(("the shorter is chosen", [_shorter(side) for side in sides]))
    return lines


def _shorter(side: TokenFigures) -> str:
    return share(side.pairs.shorter_chosen, side.pairs.chosen.count) if side.pairs else "–"


def _row(inspection: Inspection, shown: Shown) -> dict[str, Any]:
    def sequence(of: Any) -> dict[str, Any]:
        found = pieces(of, inspection.tokenizer, limit=TOKENS)
        documents: list[list[Piece | Gap]] = [[]]
        for piece in found:
            if isinstance(piece, Piece) and piece.starts:
                documents.append([])
            documents[-1].append(piece)
        return {"name": of.name, "tokens": len(of.ids), "documents": documents}

    return {
        "title": row_title(shown),
        "sequences": [sequence(each) for each in shown.view.sequences],
        "beside": [sequence(each) for each in shown.view.beside],
        "label": shown.view.label,
    }
