"""Recipes and presets: found, read, composed, changed from the command line and written again."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recipe_files import GOOD, fault, faults, model_section, write

from anyformer.recipes import loading
from anyformer.recipes.loading import RecipeError, load_preset, load_recipe, shipped
from anyformer.recipes.schema import LoraAdapter, NoAdapter
from anyformer.recipes.yaml_tree import plain, read_yaml, write_yaml


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# Reading


def test_defaults_of_a_minimal_recipe():
    recipe = load_recipe(write(GOOD, "mine.yaml"))
    assert recipe.train == {"output_dir": "runs/mine"}
    assert isinstance(recipe.adapter, NoAdapter)
    assert recipe.adapter.arguments() == {}
    assert (recipe.model.dtype, recipe.model.attn_implementation, recipe.model.verify_import) == (
        "float32",
        "sdpa",
        True,
    )
    assert (recipe.data.format, recipe.data.eval_fraction, recipe.data.seed) == ("auto", 0.1, 0)
    assert (recipe.objective.kind, recipe.objective.loss_on) == ("sft", "completion")
    assert (recipe.eval.samples, recipe.eval.max_new_tokens, recipe.eval.before, recipe.eval.batch_size) == (
        3,
        64,
        True,
        8,
    )
    assert recipe.hub is None


def test_yaml_1_2_scalars():
    text = (
        GOOD
        + "train: {learning_rate: 1e-4, save_strategy: no, weight_decay: 0, run_name: 2020-01-01, logging_steps: 5}"
    )
    train = load_recipe(write(text)).train
    assert train["learning_rate"] == 1e-4
    assert isinstance(train["learning_rate"], float)
    assert train["save_strategy"] == "no"
    assert train["run_name"] == "2020-01-01"
    # What the class calls float stays the whole number that was written.
    assert isinstance(train["logging_steps"], int)


def test_a_section_left_empty_is_its_default():
    recipe = load_recipe(write(GOOD + "train:\nadapter:\nhub: null\neval:\nobjective: ~\n"))
    assert recipe == load_recipe(write(GOOD))


def test_a_null_key_of_ours_is_its_default_and_of_the_trainer_is_null():
    recipe = load_recipe(write(GOOD + "eval: {samples: null}\ntrain: {max_length: null}\n"))
    assert recipe.eval.samples == 3
    assert recipe.train["max_length"] is None


def test_anchors_and_merge_keys():
    recipe = load_recipe(write(GOOD + "train: {<<: {max_steps: 3, seed: 1}, seed: 2}\n"))
    assert (recipe.train["max_steps"], recipe.train["seed"]) == (3, 2)


UNREADABLE = [
    ("empty", b"", "r.yaml:1: the file is empty"),
    ("comment only", b"# nothing\n", "r.yaml:1: the file is empty"),
    ("latin-1", b"model:\n  path: caf\xe9\n", "r.yaml:2: byte 0xE9 is not UTF-8"),
    ("utf-16", "model: 1".encode("utf-16"), "r.yaml:1: byte 0xFF is not UTF-8"),
    ("tab", b"model:\n\tpath: x\n", "r.yaml:2: broken YAML: a tab"),
    ("two colons", b"model:\n  path: a: b\n", "r.yaml:2: broken YAML: a second ':'"),
    ("unclosed list", b"model: [a,\n\n", "r.yaml:3: broken YAML"),
    ("list at the top", b"- model\n", "r.yaml:1: must hold a mapping (key: value) at the top, found a list"),
    ("text at the top", b"\nhello\n", "r.yaml:2: must hold a mapping (key: value) at the top, found text"),
    ("two documents", b"model: 1\n---\ndata: 2\n", "r.yaml:2: broken YAML: a second document"),
    ("control character", b"model:\n  path: a\x00\n", "r.yaml:2: broken YAML: the character U+0000"),
    ("unknown alias", b"model: *x\n", "r.yaml:1: broken YAML: found undefined alias"),
    ("yaml 1.1", b"%YAML 1.1\n---\nmodel: no\n", "r.yaml:1: recipes are YAML 1.2"),
    ("nested too deeply", b"[" * 1500, "r.yaml: broken YAML: nested too deeply"),
    ("far too large", b"#" * 300_000, "r.yaml: is larger than 256 kB"),
]


@pytest.mark.parametrize(("raw", "start"), [c[1:] for c in UNREADABLE], ids=[c[0] for c in UNREADABLE])
def test_unreadable_file(raw, start):
    assert fault(raw).startswith(start)


def test_aliases_that_explode_are_refused_quickly():
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    start = time.monotonic()
    assert "aliases unfold" in fault(bomb)
    assert time.monotonic() - start < 5


def test_a_byte_order_mark_is_no_fault():
    assert load_recipe(write(b"\xef\xbb\xbf" + GOOD.encode())).model.path == "some/model"


def test_duplicate_keys_at_every_depth_beside_other_faults():
    lines = faults(GOOD + "train:\n  seed: 1\n  seed: 2\n  sed: 3\nmodel:\n  path: other\n")
    assert lines == [
        "r.yaml:7: train.seed: duplicate key, first on line 6: keep one of them",
        "r.yaml:8: train.sed: unknown key; did you mean 'seed'?",
        "r.yaml:9: model: duplicate key, first on line 1: keep one of them",
    ]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("1: x", 'keys must be text, found 1; write "1" in quotes'),
        ("true: x", "keys must be text, found true"),
        ("? [a]\n: x", "keys must be text, found a list or mapping"),
        ("train: {run_name: !!python/name:os.system x}", "is not supported"),
        ("train: {seed: !!int x}", "cannot be read as int"),
        ("train: &t {report_to: *t}", "an alias holds itself"),
    ],
)
def test_odd_yaml(line, part):
    found = faults(GOOD + line)
    assert any(part in text and text.startswith("r.yaml:5") for text in found), found


# Finding


def test_missing_file_names_the_near_ones():
    write(GOOD, "recipe.yaml")
    with pytest.raises(RecipeError, match=r"recpe\.yaml: no such recipe; did you mean recipe\.yaml\?"):
        load_recipe("recpe.yaml")


def test_a_folder_is_no_recipe():
    write(GOOD, "many/a.yaml")
    with pytest.raises(RecipeError, match=r"many: is a folder: name a recipe file; in it: many/a\.yaml"):
        load_recipe("many")


@pytest.mark.parametrize("name", ["", "  ", "no/such/folder/r.yaml", "a\0b", "x" * 5000])
def test_names_of_no_file(name):
    with pytest.raises(RecipeError):
        load_recipe(name)


def test_an_override_in_the_recipe_s_place():
    with pytest.raises(RecipeError, match="the recipe comes first"):
        load_recipe("train.max_steps=5")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may read everything")
def test_unreadable_permissions():
    name = write(GOOD)
    Path(name).chmod(0)
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(name)


@pytest.fixture
def shipped_here(tmp_path, monkeypatch):
    """Shipped recipes of the test's own: `base` and `group/child`."""
    folder = tmp_path / "installed"
    write(GOOD + "train: {seed: 5}\n", str(folder / "recipes/base.yaml"))
    write("extends: ../base.yaml\ntrain: {max_steps: 2}\n", str(folder / "recipes/group/child.yaml"))
    write("hidden_size: 64\n", str(folder / "models/small.yaml"))
    monkeypatch.setattr(loading.importlib.resources, "files", lambda _: folder)


@pytest.mark.parametrize("name", ["base", "base.yaml", "configs/recipes/base.yaml", "configs/recipes/base"])
def test_shipped_recipe_by_name(shipped_here, name):
    recipe = load_recipe(name)
    assert recipe.train == {"seed": 5, "output_dir": "runs/base"}


def test_shipped_recipe_that_extends_another(shipped_here):
    assert load_recipe("group/child").train == {"seed": 5, "max_steps": 2, "output_dir": "runs/child"}


def test_a_file_goes_before_a_shipped_name(shipped_here):
    write(GOOD + "train: {seed: 9}\n", "base")
    assert load_recipe("base").train["seed"] == 9


def test_a_folder_of_the_same_name_does_not_hide_a_shipped_recipe(shipped_here):
    Path("base").mkdir()
    assert load_recipe("base").train["seed"] == 5


def test_unknown_shipped_name(shipped_here):
    with pytest.raises(RecipeError, match=r"bsae: no such recipe; did you mean base\?"):
        load_recipe("bsae")
    with pytest.raises(RecipeError, match="shipped recipes: base, group/child"):
        load_recipe("zzz")


def test_extends_a_shipped_recipe(shipped_here):
    write("extends: base\n")
    assert load_recipe("r.yaml").train["seed"] == 5


@pytest.mark.parametrize("name", sorted(shipped("recipes")))
def test_every_shipped_recipe_loads_and_comes_back(name):
    recipe = load_recipe(name)
    assert load_recipe(write(recipe.to_yaml())) == recipe


@pytest.mark.parametrize("name", sorted(shipped("models")))
def test_every_shipped_preset_loads(name):
    assert load_preset(name)["hidden_size"] > 0


# Composing


def test_extends_merges_deeply_and_the_later_wins():
    write(GOOD + "train: {seed: 1, max_steps: 1, weight_decay: 0.1}\n", "a.yaml")
    write("train: {max_steps: 2}\neval: {samples: 1}\n", "sub/b.yaml")
    write("extends: [a.yaml, sub/b.yaml]\ntrain: {weight_decay: 0.3}\n")
    recipe = load_recipe("r.yaml")
    assert recipe.train == {"seed": 1, "max_steps": 2, "weight_decay": 0.3, "output_dir": "runs/r"}
    assert recipe.eval.samples == 1


def test_extends_is_relative_to_its_file():
    write(GOOD, "deep/er/base.yaml")
    write("extends: er/base.yaml\n", "deep/r.yaml")
    assert load_recipe("deep/r.yaml").model.path == "some/model"


def test_a_fault_names_the_file_it_stands_in():
    write(GOOD + "train:\n  sed: 1\n", "base.yaml")
    lines = faults("extends: base.yaml\neval:\n  sample: 1\n")
    assert lines == [
        "r.yaml:3: eval.sample: unknown key; did you mean 'samples'?",
        "base.yaml:6: train.sed: unknown key; did you mean 'seed'?",
    ]


def test_null_resets_a_section():
    write(GOOD + "hub: {repo: me/it}\nadapter: {kind: lora, r: 4}\ntrain: {seed: 3}\n", "base.yaml")
    write("extends: base.yaml\nhub: null\nadapter: null\ntrain: null\n")
    recipe = load_recipe("r.yaml")
    assert recipe.hub is None
    assert isinstance(recipe.adapter, NoAdapter)
    assert recipe.train == {"output_dir": "runs/r"}


LORA = GOOD + "adapter:\n  kind: lora\n  r: 4\n  merge: false\n"


def test_a_change_of_kind_drops_the_old_kind_s_keys():
    write(LORA, "base.yaml")
    assert isinstance(load_recipe(write("extends: base.yaml\nadapter: {kind: none}\n")).adapter, NoAdapter)
    assert isinstance(load_recipe("base.yaml", ["adapter.kind=none"]).adapter, NoAdapter)


def test_the_same_kind_again_keeps_the_keys():
    write(LORA, "base.yaml")
    adapter = load_recipe(write("extends: base.yaml\nadapter: {kind: lora, lora_alpha: 8}\n")).adapter
    assert adapter.arguments() == {"target_modules": "all-linear", "r": 4, "lora_alpha": 8}
    assert adapter.merge is False


def test_a_typo_survives_a_change_of_kind():
    write(GOOD + "adapter:\n  kind: lora\n  rr: 4\n", "base.yaml")
    assert fault("extends: base.yaml\nadapter: {kind: none}\n") == "base.yaml:7: adapter.rr: unknown key; known: kind"


def test_circles_are_reported():
    write("extends: b.yaml\n" + GOOD, "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    with pytest.raises(RecipeError, match=r"b\.yaml:1: extends: goes in a circle: a\.yaml -> b\.yaml -> a\.yaml"):
        load_recipe("a.yaml")
    assert "goes in a circle" in fault("extends: r.yaml\n" + GOOD)


def test_the_same_parent_twice_is_no_circle():
    write(GOOD, "base.yaml")
    write("extends: base.yaml\ntrain: {seed: 1}\n", "a.yaml")
    write("extends: base.yaml\ntrain: {max_steps: 3}\n", "b.yaml")
    assert load_recipe(write("extends: [a.yaml, b.yaml]\n")).train["seed"] == 1


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("basee.yaml", "r.yaml:1: extends: basee.yaml: no such recipe; did you mean"),
        ("3", "r.yaml:1: extends: must be a recipe file or a list of them, found a whole number"),
        ("[base.yaml, 3]", "r.yaml:1: extends.1: must be a recipe file"),
        ("{a: b}", "r.yaml:1: extends: must be a recipe file or a list of them, found a mapping"),
    ],
)
def test_extends_faults(value, part):
    write(GOOD, "base.yaml")
    assert fault(f"extends: {value}\n" + GOOD).startswith(part)


def test_a_broken_parent_is_reported_beside_the_child_s_faults():
    write("a: b: c\n", "base.yaml")
    lines = faults("extends: base.yaml\n" + GOOD + "tran: {}\n")
    assert lines[0].startswith("r.yaml:6: tran: unknown key; did you mean 'train'?")
    assert lines[1].startswith("base.yaml:1: broken YAML")


# Overrides


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.learning_rate=1e-4", "train", "learning_rate", 1e-4),
        ("train.max_steps=-1", "train", "max_steps", -1),
        ("train.save_strategy=no", "train", "save_strategy", "no"),
        ("train.max_length=null", "train", "max_length", None),
        ("train.max_length=", "train", "max_length", None),
        ("train.run_name=a=b", "train", "run_name", "a=b"),
        ("train.report_to=[tensorboard]", "train", "report_to", ["tensorboard"]),
        ("train.accelerator_config.split_batches=true", "train", "accelerator_config", {"split_batches": True}),
        ("data.source=*.jsonl", "data", "source", "*.jsonl"),
        ("data.columns={prompt: q}", "data", "columns", {"prompt": "q"}),
    ],
)
def test_override_sets(override, section, key, value):
    recipe = load_recipe(write(GOOD), [override])
    holder = getattr(recipe, section)
    assert (holder[key] if isinstance(holder, dict) else getattr(holder, key)) == value


def test_override_of_list_items_and_removal():
    text = GOOD.replace("train.jsonl", "[a.jsonl, b.jsonl, c.jsonl]") + "train: {seed: 1}\n"
    recipe = load_recipe(
        write(text), ["data.source.1=x.jsonl", "~data.source.0", "data.source.2=z.jsonl", "~train.seed"]
    )
    assert recipe.data.source == ["x.jsonl", "c.jsonl", "z.jsonl"]
    assert "seed" not in recipe.train


def test_the_last_override_wins():
    assert load_recipe(write(GOOD), ["train.seed=1", "train.seed=2"]).train["seed"] == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train", "has no '=': write section.key=value to set a key, ~section.key to remove one"),
        ("=3", "must begin with the path of a key, such as train.learning_rate=1e-4"),
        ("train..seed=3", "must begin with the path of a key, such as train.learning_rate=1e-4"),
        ("data.source.x=3", "data.source.x: data.source is text, not a mapping: it has no keys"),
        ("extends=x", "extends: is read from files only; set the keys you want instead"),
        ("~train.seed=3", "a removal takes no value: write ~section.key"),
        ("~data.sorce", "data.sorce: the recipe sets no such key; did you mean 'source'?"),
        ("~eval.samples", "eval: the recipe sets no such key; there: model, data"),
        ("train.sed=3", "train.sed: unknown key; did you mean 'seed'?"),
        ("train.seed='3'", "train.seed: must be a whole number, found '3'; write 3 without quotes"),
        ("train.run_name=[a", None),
        ("train.run_name=a: b: c", None),
    ],
)
def test_override_faults_name_the_override(override, message):
    line = fault(GOOD, override)
    assert line.startswith(f"override {override!r}: ")
    if message is not None:
        assert line == f"override {override!r}: {message}"


def test_override_of_a_list_item_that_is_not_there():
    text = GOOD.replace("train.jsonl", "[a.jsonl]")
    assert fault(text, "data.source.5=x").endswith("data.source.5: the list has 1 items: give a number from 0 to 1")
    assert "the list has 1 items" in fault(text, "data.source.x=x")


# Writing

FULL = """\
model: {path: some/model, config: {attention_dropout: 0.1}, dtype: bfloat16, revision: main}
adapter: {kind: lora, r: 4, target_modules: [q_proj], eva_config: {rho: 1.5}, init_lora_weights: eva, merge: false}
data: {source: ["a.jsonl", "*.csv"], columns: {prompt: "no", completion: "1e-4"}, eval_source: b.jsonl, max_rows: 10}
objective: {kind: sft, loss_on: all}
train: {learning_rate: 1e-5, max_length: null, save_strategy: no, run_name: "null", logging_steps: 1, seed: 0x10}
eval: {samples: 0, before: false}
logging: {level: warning}
hub: {repo: me/it, commit_message: "two\\nlines: é"}
"""


def test_resolved_recipe_comes_back_equal():
    recipe = load_recipe(write(FULL))
    text = recipe.to_yaml()
    again = load_recipe(write(text, "other-name.yaml"))
    assert again == recipe
    assert again.to_yaml() == text
    assert again.adapter.arguments() == {
        "r": 4,
        "target_modules": ["q_proj"],
        "eva_config": {"rho": 1.5},
        "init_lora_weights": "eva",
    }
    assert again != load_recipe("r.yaml", ["train.seed=17"])


def test_resolved_recipe_holds_our_defaults_and_only_given_keys_of_the_libraries():
    written = plain(read_yaml(load_recipe(write(LORA)).to_yaml().encode(), "x")[0])
    assert written["adapter"] == {"kind": "lora", "merge": False, "target_modules": "all-linear", "r": 4}
    assert written["train"] == {"output_dir": "runs/r"}
    assert written["data"]["on_bad_row"] == "error"
    assert written["eval"] == {"samples": 3, "max_new_tokens": 64, "before": True, "batch_size": 8}
    assert "hub" not in written


ODD = {"a": 1e-5, "b": "no", "c": "1e-4", "d": None, "e": [1, None, "x: y"], "f": "2020-01-01", "g": float("inf")}
ODD |= {
    "h": "a\nb",
    "i": {},
    "j": [],
    "k": "null",
    "l": True,
    "m": "true",
    "n": "*x",
    "o": "017",
    "p": "0x1f",
    "q": "",
}
ODD |= {"r": "a b " * 200, "s": " x ", "t": "#a", "u": "1_000", "~": "~", "on": "<<", "tab": "a\tb", "v": 1e22}


def test_written_values_are_read_back_unchanged():
    root, problems = read_yaml(write_yaml(ODD).encode(), "x")
    assert not problems
    assert plain(root) == ODD


def test_a_full_recipe_is_accepted_by_the_real_classes():
    from peft import LoraConfig
    from trl import SFTConfig

    recipe = load_recipe(write(FULL))
    config = LoraConfig(**recipe.adapter.arguments(), task_type="CAUSAL_LM")
    assert (config.r, config.eva_config.rho) == (4, 1.5)
    assert isinstance(recipe.adapter, LoraAdapter)
    assert SFTConfig(**recipe.train, bf16=False, use_cpu=True).max_length is None


# Presets


def test_preset_by_name_and_by_file(shipped_here):
    assert load_preset("small") == {"hidden_size": 64}
    assert load_preset("configs/models/small.yaml") == {"hidden_size": 64}
    write("hidden_size: 32\nnorm_eps: 1e-5\nrms_norm_eps: 1e-5\n", "mine.yaml")
    assert load_preset("mine.yaml")["norm_eps"] == 1e-5


def test_preset_faults_name_file_and_line(shipped_here):
    write("hidden_size: 32\nhiden_size: 3\nnum_attention_heads: '4'\nrope_scaling: {factor: 2}\n", "mine.yaml")
    with pytest.raises(RecipeError) as caught:
        load_preset("mine.yaml")
    assert str(caught.value).splitlines() == [
        "mine.yaml:2: hiden_size: unknown key; did you mean 'hidden_size'?",
        "mine.yaml:3: num_attention_heads: must be a whole number, found '4'; write 4 without quotes",
        "mine.yaml:4: rope_scaling: unknown key; did you mean 'rope_parameters: {rope_type: ..., factor: ...}'?",
    ]
    lines = faults(model_section("{preset: mine.yaml, tokenizer: a/b}") + "train: {sed: 1}\n")
    assert len(lines) == 4
    assert any(line.startswith("mine.yaml:2: ") for line in lines)
    with pytest.raises(RecipeError, match=r"smal: no such preset; did you mean small\?"):
        load_preset("smal")


def test_loading_imports_nothing_heavy_and_is_quick():
    write(FULL)
    code = (
        "import sys; from anyformer.recipes.loading import load_recipe; load_recipe('r.yaml');"
        "print(sorted({'torch', 'transformers', 'trl', 'peft', 'datasets', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
