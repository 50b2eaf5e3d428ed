"""Every shipped recipe runs from end to end, made small by the file of its name in `small/`."""

import json
from pathlib import Path

import pytest

from anyformer.recipes.loading import load_recipe, shipped
from anyformer.recipes.run import run_recipe

SMALL = Path(__file__).parent / "small"


@pytest.mark.parametrize("name", shipped("recipes"))
def test_a_shipped_recipe_runs(name, tmp_path, tiny_checkpoint):
    file = SMALL / f"{name}.yaml"
    assert file.is_file(), f"write {file}: `extends: {name}`, a small model or TINY, few rows, a few steps"
    text = file.read_text(encoding="utf-8").replace("TINY", str(tiny_checkpoint)).replace("FOLDER", str(SMALL))
    small = tmp_path / "small.yaml"
    small.write_text(text, encoding="utf-8")
    folder = run_recipe(load_recipe(small, [f"train.output_dir={tmp_path / 'run'}"]))
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["finished"]
    assert set(metrics["measured"]["shown"]) <= set(metrics["after"])
