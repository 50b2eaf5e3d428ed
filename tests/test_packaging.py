"""What an installed copy holds, as against a checkout."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_an_installation_has_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    tops = ("anyformer", "configs", "modeling", "recipes", "scripts")
    folders = {file.parent.relative_to(ROOT) for top in tops for file in (ROOT / top).rglob("*.py")}
    named = {folder.as_posix(): ".".join(("anyformer", *folder.parts)) for folder in folders} | {
        "anyformer": "anyformer"
    }
    assert settings["package-dir"] == {name: folder for folder, name in named.items()}
    assert sorted(settings["packages"]) == sorted(named.values())
