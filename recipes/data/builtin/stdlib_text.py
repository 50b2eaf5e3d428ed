"""Text for pretraining that every Python machine has: the standard library's source files."""

import importlib.util
import sysconfig
from pathlib import Path

from ...errors import UserError
from ..files import Skipped
from .base import Loaded
from .docstrings import library_modules, library_unit


def load(root: str | Path | None = None) -> Loaded:
    """`{"text": a whole source file}`, ordered by module name; about 700 files and 12 million characters.

    Empty files, copies of another file and files that do not decode are left out.

    Args:
        root: a folder of Python packages; the running interpreter's standard library by default.

    Raises:
        UserError: the folder has no Python sources (zipped or byte-code-only installations).
    """
    folder = Path(root) if root is not None else Path(sysconfig.get_path("stdlib"))
    loaded, seen = Loaded(), set()
    for module, path in sorted(library_modules(folder)):
        try:
            text = importlib.util.decode_source(path.read_bytes())  # obeys the coding line
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            loaded.skipped.append(Skipped(str(path), 0, type(error).__name__))
            continue
        if text.strip() and text not in seen:
            seen.add(text)
            loaded.add({"text": text}, library_unit(module))
    if not loaded.rows:
        raise UserError(
            f"the standard library at {folder} holds no readable Python sources. Use a Python "
            "installation that ships its .py files, or name files of your own in data.source."
        )
    return loaded
