"""The verb `compare`: from run folders to tables, a page or JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..pages import check_page_file, save_page
from .collect import compare_runs


def show_comparison(folders: Sequence[Path], *, html: Path | None = None, as_json: bool = False) -> None:
    """Print a comparison of runs.

    Args:
        html: a file to write a page to.
        as_json: print figures and nothing else.

    Raises:
        UserError: folders that cannot be compared, or a page that cannot be written.
    """
    if html is not None:
        check_page_file(html, "compare.html")
    comparison = compare_runs(folders)
    if html is not None:
        from .page import render

        save_page(render(comparison), html)
    if as_json:
        json.dump(comparison.as_dict(), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        sys.stdout.write("\n")
        return
    from rich.console import Console

    from .terminal import show

    console = Console(highlight=False)
    show(console, comparison)
    if html is not None:
        console.print(f"\nPage: {html}", markup=False, soft_wrap=True)
