"""Pages in one HTML file that needs nothing else: no network, no script, no font."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import __version__
from .console import harmless
from .errors import UserError


def render_page(package: str, **values: Any) -> str:
    """The `page.html` of a package as text, on top of `base.html`.

    All that is not markup is escaped, and its control characters are written out as in the terminal.
    """
    from jinja2 import DictLoader, Environment, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> str:
        return value if isinstance(value, Markup) else harmless(str(value))

    templates = {
        "base.html": files(__package__).joinpath("base.html").read_text(encoding="utf-8"),
        "page.html": files(package).joinpath("page.html").read_text(encoding="utf-8"),
    }
    environment = Environment(
        loader=DictLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(version=__version__, **values)


def check_page_file(file: Path, example: str) -> None:
    """Raises:
    UserError: `--html` names a folder; `example` is a name for a file in it.
    """
    if file.is_dir():
        raise UserError(f"--html: {file} is a folder; give the name of a file, such as {file / example}")


def save_page(text: str, file: Path) -> None:
    """Write a page.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"--html: {file} cannot be written: {error.strerror}") from error
