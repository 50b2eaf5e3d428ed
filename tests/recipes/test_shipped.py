"""Every shipped recipe runs from end to end, made small by the file of its name in `small/`."""

import json
from pathlib import Path

import pytest

from anyformer.recipes.loading import load_recipe, shipped
from anyformer.recipes.run import run_recipe

SMALL = Path(__file__).parent / "small"


@pytest.mark.parametrize("name", shipped("recipes"))
def test_a_shipped_recipe_runs(name, tmp_path, tiny_checkpoint, tiny_bert):
    file = SMALL / f"{name}.yaml"
    assert file.is_file(), f"write {file}: `extends: {name}`, a small model, TINY or ENCODER, few rows, a few steps"
    text = file.read_text(encoding="utf-8")
    for word, folder in (("TINY", tiny_checkpoint), ("ENCODER", tiny_bert), ("FOLDER", SMALL)):
        text = text.replace(word, str(folder))
    small = tmp_path / "small.yaml"
    small.write_text(text, encoding="utf-8")
    folder = run_recipe(load_recipe(small, [f"train.output_dir={tmp_path / 'run'}"]))
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["finished"]
    assert set(metrics["measured"]["shown"]) <= set(metrics["after"])
