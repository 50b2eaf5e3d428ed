"""Every shipped recipe and pipeline runs from end to end, made small by the files of its name in `small/`."""

import json
from pathlib import Path

import pytest

from anyformer.recipes.loading import load_recipe, shipped, shipped_pipelines, stage_files
from anyformer.recipes.pipeline import run_pipeline
from anyformer.recipes.run import run_recipe
from anyformer.recipes.stages import load_pipeline

SMALL = Path(__file__).parent / "small"


@pytest.fixture
def models(tiny_checkpoint, tiny_bert):
    """Words of the small files -> the folders that they stand for."""
    return {"TINY": tiny_checkpoint, "ENCODER": tiny_bert, "FOLDER": SMALL}


def write_small(file: Path, target: Path, folders: dict[str, Path]) -> Path:
    """The small version of a shipped file, with the folders of this machine in it."""
    hint = f"`extends: {file.stem}`, a small model, TINY or ENCODER, few rows, a few steps"
    assert file.is_file(), f"write {file}: {hint}"
    text = file.read_text(encoding="utf-8")
    for word, folder in folders.items():
        text = text.replace(word, str(folder))
    target.write_text(text, encoding="utf-8")
    return target


def metrics_of(folder: Path):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", shipped("recipes"))
def test_a_shipped_recipe_runs(name, tmp_path, models):
    small = write_small(SMALL / f"{name}.yaml", tmp_path / "small.yaml", models)
    metrics = metrics_of(run_recipe(load_recipe(small, [f"train.output_dir={tmp_path / 'run'}"])))
    assert metrics["finished"]
    assert set(metrics["measured"]["shown"]) <= set(metrics["after"])


@pytest.mark.parametrize("name", shipped_pipelines())
def test_a_shipped_pipeline_runs(name, tmp_path, models):
    small = tmp_path / Path(name).name
    small.mkdir()
    for file in stage_files(shipped_pipelines()[name]):
        write_small(SMALL / name / file.name, small / file.name, models)
    pipeline = load_pipeline(small, [f"train.output_dir={tmp_path / 'run'}"])
    folder = run_pipeline(pipeline)
    for stage in pipeline.stages:
        metrics = metrics_of(stage.folder)
        assert metrics["finished"] and set(metrics["measured"]["shown"]) <= set(metrics["after"])
    assert json.loads((folder / "pipeline.json").read_text(encoding="utf-8"))["finished"]
    assert (folder / "report.md").is_file()
