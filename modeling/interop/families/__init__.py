"""One file a family. Each defines `FAMILY`; a new file in this folder is found by itself."""

import importlib
import pkgutil

from ..family import Family


def _collect() -> dict[str, Family]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    families = [importlib.import_module(f".{name}", __name__).FAMILY for name in names]
    # Llama first: what several classes can express is exported as the best known of them.
    families.sort(key=lambda family: family.model_type != "llama")
    return {family.model_type: family for family in families}


FAMILIES: dict[str, Family] = _collect()
