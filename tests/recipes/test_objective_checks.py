"""Objectives that cannot train the recipe's preset, and settings of objectives that contradict each other."""

import subprocess
import sys

import pytest
from recipe_files import fault, write

from anyformer.modeling.registry import VALUES
from anyformer.recipes import schema
from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_preset, load_recipe, shipped
from anyformer.recipes.model_paths import resolve_path

DATA = "data: {source: a.jsonl}\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def recipe_text(preset, objective, config="{}"):
    model = f"model: {{preset: {preset}, tokenizer: a/b, config: {config}}}\n"
    return DATA + model + f"objective: {objective}\n"


def problems(text):
    """The faults of a recipe; none where an objective has keys that must be given."""
    try:
        load_recipe(write(text))
    except UserError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize("preset", ["mini-gpt", "bert-base", "t5-base"])
@pytest.mark.parametrize("kind", schema.OBJECTIVES)
def test_an_objective_takes_the_presets_of_its_shapes_alone(preset, kind):
    shape = load_preset(preset).get("architecture", "decoder")
    lines = problems(recipe_text(preset, f"{{kind: {kind}}}"))
    found = [line for line in lines if "does not train" in line]
    if shape in schema.OBJECTIVES[kind].shapes:
        assert not found
        return
    (line,) = found
    assert f"objective.kind: {kind} does not train the preset {preset}: it has architecture {shape}" in line
    fitting = [name for name, entry in schema.OBJECTIVES.items() if shape in entry.shapes]
    assert all(name in line.partition("goes with")[2] for name in fitting)


def test_the_recipes_own_config_decides_over_the_preset():
    text = recipe_text("mini-gpt", "{kind: pretrain}", "{architecture: encoder}")
    assert "objective.kind: pretrain does not train the preset mini-gpt: it has architecture encoder" in fault(text)
    assert load_recipe(write(recipe_text("mini-gpt", "{kind: mlm}", "{architecture: encoder}")))


@pytest.mark.parametrize("preset", shipped("models"))
def test_every_preset_has_a_shape_that_is_known(preset):
    assert VALUES["architecture"] == schema.SHAPES
    assert load_preset(preset).get("architecture", "decoder") in schema.SHAPES


FAULTS = [
    (recipe_text("mini-gpt", "{kind: mlm-nsp}", "{architecture: encoder}"), "objective.kind: mlm-nsp reads the pooler"),
    (
        recipe_text("bert-base", "{kind: mlm-nsp}", "{type_vocab_size: 1}"),
        "which the preset bert-base lacks: set model.config: {pooler: true, type_vocab_size: 2}",
    ),
    (
        recipe_text("bert-base", "{kind: mlm, whole_word: true, mask_replace_prob: 0.8}"),
        "objective.mask_replace_prob: must be 1 or left out, found 0.8: the mask token alone hides whole words",
    ),
    (
        recipe_text("bert-base", "{kind: mlm, whole_word: true, random_replace_prob: 0.1}"),
        "objective.random_replace_prob: must be 0 or left out, found 0.1",
    ),
    (
        recipe_text("bert-base", "{kind: mlm, random_replace_prob: 0.3}"),
        "objective.random_replace_prob: and mask_replace_prob come to 1.1",
    ),
    (recipe_text("bert-base", "{kind: mlm, mlm_probability: 0}"), "objective.mlm_probability: must be at least 0.01"),
    (recipe_text("bert-base", "{kind: mlm, mlm_probability: many}"), "objective.mlm_probability: must be a number"),
    (recipe_text("bert-base", "{kind: mlm, mask_replace_prob: [1]}"), "objective.mask_replace_prob: must be a number"),
    (recipe_text("bert-base", "{kind: mlm, mask_prob: 0.2}"), "objective.mask_prob: unknown key; did you mean"),
    (recipe_text("bert-base", "{kind: mlm, packing: blocks}"), "objective.packing: unknown key"),
    (recipe_text("mini-gpt", "{kind: pretrain, packing: rows}"), "must be blocks, documents or none, found 'rows'"),
    (recipe_text("mini-gpt", "{kind: pretrain, max_length: 1}"), "objective.max_length: must be at least 2"),
    (
        recipe_text("mini-gpt", "{kind: pretrain}") + "train: {max_length: 64}",
        "train.max_length: unknown key; did you mean 'objective.max_length'?",
    ),
    (
        recipe_text("mini-gpt", "{kind: pretrain}") + "train: {label_smoothing_factor: 0.1}",
        "train.label_smoothing_factor: is not part of this objective's loss",
    ),
    (
        recipe_text("bert-base", "{kind: mlm}") + "train: {remove_unused_columns: true}",
        "train.remove_unused_columns: is set by the suite",
    ),
]


@pytest.mark.parametrize(("text", "part"), FAULTS, ids=[f"{i}-{c[1][:40]}" for i, c in enumerate(FAULTS)])
def test_fault_of_an_objective(text, part):
    assert part in fault(text)


def test_a_preset_that_is_missing_is_told_of_once():
    assert "no such preset" in fault(recipe_text("bert-bas", "{kind: mlm}"))


def test_whole_words_set_what_they_need_and_say_so_in_the_resolved_recipe():
    recipe = load_recipe(write(recipe_text("bert-base", "{kind: mlm, whole_word: true}")))
    assert (recipe.objective.mask_replace_prob, recipe.objective.random_replace_prob) == (1.0, 0.0)
    assert load_recipe(write(recipe.to_yaml(), "again.yaml")) == recipe


def test_a_preset_is_checked_without_torch():
    write(recipe_text("mini-gpt", "{kind: mlm}"))
    code = (
        "import sys\nfrom anyformer.recipes.loading import RecipeError, load_recipe\n"
        "try:\n    load_recipe('r.yaml')\nexcept RecipeError as error:\n    print(error)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "mlm does not train the preset mini-gpt" in done.stdout


# What a `package:` path may name


def test_a_package_path_names_a_file_or_a_folder(tmp_path, monkeypatch):
    folder = tmp_path / "some_models" / "small"
    folder.mkdir(parents=True)
    (tmp_path / "some_models" / "__init__.py").touch()
    (tmp_path / "some_models" / "one.gguf").touch()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_path("package:some_models/small") == str(folder)
    assert resolve_path("package:some_models/small/config.json") == str(folder / "config.json")
    with pytest.raises(UserError, match=r"no file or folder 'large'; models in it: \['one.gguf', 'small'\]"):
        resolve_path("package:some_models/large")
