"""A comparison as one HTML page."""

from ..pages import render_page
from .collect import Comparison
from .curves import COLOURS, draw
from .wording import NOTE, SCORES_NOTE, title, verdict


def render(comparison: Comparison) -> str:
    """The page as text. All that comes out of the runs is escaped."""
    from markupsafe import Markup

    return render_page(
        __package__,
        comparison=comparison,
        # What is drawn holds numbers and words of ours alone.
        curves=[picture._replace(svg=Markup(picture.svg)) for picture in draw(comparison.runs)],
        colours=COLOURS,
        note=NOTE,
        scores_note=SCORES_NOTE,
        titled=title,
        verdict=verdict,
    )
