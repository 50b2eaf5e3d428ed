"""Small versions of the shipped recipes: files of their names in `small/`, with words for this machine's folders."""

from pathlib import Path

SMALL = Path(__file__).parent / "small"


def folders(tiny: Path, encoder: Path) -> dict[str, Path]:
    """Words of the small files -> the folders that they stand for."""
    return {"TINY": tiny, "ENCODER": encoder, "FOLDER": SMALL}


def write_small(file: Path, target: Path, folders: dict[str, Path]) -> Path:
    """The small version of a shipped file, with the folders of this machine in it."""
    hint = f"`extends: {file.stem}`, a small model, TINY or ENCODER, few rows, a few steps"
    assert file.is_file(), f"write {file}: {hint}"
    text = file.read_text(encoding="utf-8")
    for word, folder in folders.items():
        text = text.replace(word, str(folder))
    target.write_text(text, encoding="utf-8")
    return target
