"""Every shipped recipe and pipeline runs from end to end, made small by the files of its name in `small/`."""

import json
from pathlib import Path

import pytest
from small_recipes import SMALL, folders, write_small

from anyformer.recipes.comparison.collect import compare_runs
from anyformer.recipes.comparison.page import render
from anyformer.recipes.held_rows import kept_rows
from anyformer.recipes.loading import load_recipe, shipped, shipped_pipelines, stage_files
from anyformer.recipes.pipeline import run_pipeline
from anyformer.recipes.run import run_recipe
from anyformer.recipes.stages import load_pipeline


@pytest.fixture
def models(tiny_checkpoint, tiny_bert):
    return folders(tiny_checkpoint, tiny_bert)


def metrics_of(folder: Path):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def check_rows(folder: Path):
    """What each held-out row adds makes the run's figures."""
    metrics = metrics_of(folder)
    if not metrics["after"]:
        assert not (folder / "held_out.json").exists()
        return
    kept = kept_rows(folder)
    assert set(kept) == {"before", "after"} & set(metrics)
    for when, rows in kept.items():
        assert len(rows.digests) == metrics[when]["rows"]
        found = rows.figures()
        assert found.keys() & set(metrics["measured"]["shown"])
        assert found == pytest.approx({name: metrics[when][name] for name in found}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", shipped("recipes"))
def test_a_shipped_recipe_runs(name, tmp_path, models):
    small = write_small(SMALL / f"{name}.yaml", tmp_path / "small.yaml", models)
    recipe = load_recipe(small, [f"train.output_dir={tmp_path / 'run'}"])
    metrics = metrics_of(run_recipe(recipe))
    assert metrics["finished"]
    assert set(metrics["measured"]["shown"]) <= set(metrics["after"])
    check_rows(tmp_path / "run")


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
    compared = compare_runs([folder])
    assert compared.names == [stage.name for stage in pipeline.stages]
    assert all(figure.cells for figure in compared.figures) and render(compared).startswith("<!doctype html>")
