"""Every shipped recipe and pipeline runs from end to end, made small by the files of its name in `small/`."""

import json
from pathlib import Path

import pytest
from small_recipes import SMALL, folders, write_small

from anyformer.recipes.comparison.collect import compare_runs
from anyformer.recipes.comparison.page import render
from anyformer.recipes.loading import load_recipe, shipped, shipped_pipelines, stage_files
from anyformer.recipes.pipeline import run_pipeline
from anyformer.recipes.run import run_recipe
from anyformer.recipes.stages import load_pipeline


@pytest.fixture
def models(tiny_checkpoint, tiny_bert):
    return folders(tiny_checkpoint, tiny_bert)


def metrics_of(folder: Path):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


# Objectives whose figures are not kept row by row.
WITHOUT_ROWS = {"medusa", "eagle", "mtp", "token-classify"}


def check_rows(folder: Path, kind: str):
    """What each held-out row adds makes the run's figures: a ratio of two sums each."""
    metrics, file = metrics_of(folder), folder / "held_out.json"
    if kind in WITHOUT_ROWS or not metrics["after"]:
        assert not file.exists()
        return
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert set(kept) == {"before", "after"} & set(metrics)
    for when in kept:
        assert len(kept[when]["rows"]) == metrics[when]["rows"]
        assert kept[when]["parts"].keys() & set(metrics["measured"]["shown"])
        for name, parts in kept[when]["parts"].items():
            sums = [sum(side) for side in zip(*parts, strict=True)]
            assert sums[0] / sums[1] == pytest.approx(metrics[when][name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", shipped("recipes"))
def test_a_shipped_recipe_runs(name, tmp_path, models):
    small = write_small(SMALL / f"{name}.yaml", tmp_path / "small.yaml", models)
    recipe = load_recipe(small, [f"train.output_dir={tmp_path / 'run'}"])
    metrics = metrics_of(run_recipe(recipe))
    assert metrics["finished"]
    assert set(metrics["measured"]["shown"]) <= set(metrics["after"])
    check_rows(tmp_path / "run", recipe.objective.kind)


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
