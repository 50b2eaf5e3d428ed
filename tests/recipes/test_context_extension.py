"""`model.context_extension`: what it makes of a config, what it refuses, and what a run keeps of it."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from anyformer import AnyformerConfig
from anyformer.recipes.context_extension import extend_context, ramp_factors
from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import RecipeError, load_recipe
from anyformer.recipes.models import config_of_checkpoint
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe
from anyformer.recipes.stages import load_pipeline

TRAINED, THETA = 128, 5e4
SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": TRAINED}
ROPE = {"rope_type": "default", "rope_theta": THETA}


def extended(method, length=512, rope=None, **fields):
    config = AnyformerConfig(**SIZES | fields, rope_parameters=rope or dict(ROPE))
    extend_context(config, method, length)
    config.validate()
    assert config.max_position_embeddings == length
    return config.rope_parameters


def test_each_method_writes_what_its_paper_says():
    assert extended("linear") == {"rope_theta": THETA, "rope_type": "linear", "factor": 4.0}
    assert extended("ntk") == {"rope_type": "default", "rope_theta": pytest.approx(THETA * 4 ** (16 / 14))}
    known = {"rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": TRAINED}
    assert extended("yarn") == known | {"rope_type": "yarn"}
    longrope = extended("longrope")
    assert longrope.pop("short_factor") == [1.0] * 8
    assert longrope.pop("long_factor") == ramp_factors(16, THETA, 4.0, TRAINED)
    assert longrope == known | {"rope_type": "longrope"}


def test_ntk_slows_the_slowest_pair_by_the_factor_and_the_fastest_not_at_all():
    base = extended("ntk")["rope_theta"]
    slower = [(base / THETA) ** (2 * pair / 16) for pair in range(8)]
    assert slower[0] == 1.0 and slower[-1] == pytest.approx(4.0)


def test_longropes_factors_are_yarns_interpolation(tiny):
    rope = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 2048}
    fields = {"head_dim": 64, "max_position_embeddings": 16384}
    table = tiny(**fields, rope_parameters=rope | {"rope_type": "yarn"}).model.positions.tables["0"]
    factors = ramp_factors(64, 1e4, 8.0, 2048)
    plain = 1e4 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(plain / torch.tensor(factors, dtype=torch.float64), table.inv_freq.double())
    assert factors == sorted(factors) and (factors[0], factors[-1]) == (1.0, 8.0)


def test_a_share_of_rotated_values_and_windowed_layers_keep_what_they_have():
    part = extended("yarn", rope=ROPE | {"partial_rotary_factor": 0.5})
    assert part["partial_rotary_factor"] == 0.5
    assert len(extended("longrope", rope=ROPE | {"partial_rotary_factor": 0.5})["long_factor"]) == 4
    nested = {"full_attention": dict(ROPE), "sliding_attention": ROPE | {"rope_theta": 1e3}}
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
    found = extended("yarn", rope=nested, **windows)
    assert found["sliding_attention"] == ROPE | {"rope_theta": 1e3}
    assert found["full_attention"]["factor"] == 4.0


def test_extended_once_more_the_factor_is_counted_from_the_first_length():
    config = AnyformerConfig(**SIZES, rope_parameters=dict(ROPE))
    extend_context(config, "yarn", 256)
    extend_context(config, "longrope", 1024)
    assert config.rope_parameters["factor"] == 8.0
    assert config.rope_parameters["original_max_position_embeddings"] == TRAINED
    assert config.rope_parameters["long_factor"][-1] == 8.0


@pytest.mark.parametrize(
    ("method", "fields", "said"),
    [
        ("yarn", {"position_embedding": "alibi", "rope_parameters": None}, "this model has position_embedding='alibi'"),
        ("ntk", {"rope_thetas": [1e4, 1e5]}, "has one for each layer"),
        (
            "yarn",
            {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}},
            "scaled already .rope_type 'linear'",
        ),
        ("yarn", {"max_position_embeddings": 512}, "is 512, and the model was trained for 512: give a longer one"),
    ],
)
def test_what_cannot_be_extended_is_refused(method, fields, said):
    config = AnyformerConfig(**SIZES | {"rope_parameters": dict(ROPE)} | fields)
    with pytest.raises(UserError, match=said):
        extend_context(config, method, 512)


# Of a checkpoint, by hand


@pytest.fixture
def changed(tmp_path):
    """A function: the config of a checkpoint with these changes of a recipe."""

    def config(changes, **fields):
        values = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
        values |= {"num_attention_heads": 4, "max_position_embeddings": TRAINED, "rope_parameters": dict(ROPE)}
        LlamaForCausalLM(LlamaConfig(**values | fields)).save_pretrained(tmp_path)
        return config_of_checkpoint(
            SimpleNamespace(path=str(tmp_path), revision=None, trust_remote_code=False, config=changes)
        )

    return config


def test_rope_parameters_of_a_recipe_keep_base_and_trained_length(changed):
    yarn = {"rope_type": "yarn", "factor": 4.0}
    config = changed({"max_position_embeddings": 512, "rope_parameters": yarn})
    assert config.rope_parameters == yarn | {"rope_theta": THETA, "original_max_position_embeddings": TRAINED}
    assert changed({"rope_parameters": {"rope_theta": 1e6}}).rope_parameters["rope_theta"] == 1e6
    own = yarn | {"original_max_position_embeddings": 64}
    assert changed({"rope_parameters": own}).rope_parameters["original_max_position_embeddings"] == 64
    again = changed(
        {"max_position_embeddings": 1024, "rope_parameters": yarn | {"factor": 8.0}}, rope_parameters=own | ROPE | own
    )
    assert again.rope_parameters["original_max_position_embeddings"] == 64


def test_lengths_that_the_weights_or_the_scaling_cannot_have_are_refused(changed, tiny, tmp_path):
    with pytest.raises(UserError, match=r"rope_type 'dynamic' stretches texts beyond it, so it must stay .* 128"):
        changed({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}})
    changed({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}})
    tiny(position_embedding="learned").save_pretrained(tmp_path / "learned")
    for length in (64, 512):
        section = SimpleNamespace(path=str(tmp_path / "learned"), revision=None, trust_remote_code=False)
        section.config = {"max_position_embeddings": length}
        with pytest.raises(UserError, match="has learned positions for 128 tokens, and no others can be made of them"):
            config_of_checkpoint(section)


# In a recipe


RECIPE = """
model: {{path: {path}, context_extension: {{method: yarn, length: 1024}}}}
data: {{source: {{path: passkey, arguments: {{rows: 24, words: [50, 60]}}}}, eval_fraction: 0.3}}
objective: {{kind: sft}}
train: {{output_dir: {run}, max_steps: 2, per_device_train_batch_size: 2, max_length: 1000, save_strategy: "no"}}
eval: {{samples: 1, max_new_tokens: 4}}
"""


@pytest.fixture
def recipe(tiny_checkpoint, tmp_path):
    def write(*overrides):
        file = tmp_path / "recipe.yaml"
        file.write_text(RECIPE.format(path=tiny_checkpoint, run=tmp_path / "run"), encoding="utf-8")
        return load_recipe(file, overrides)

    return write


def test_a_run_saves_the_extended_model_and_no_tokenizer_cuts_its_texts(recipe, tiny_checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint, model_max_length=256)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert dict(prepare(recipe()).objective.plan_lines())["context"].startswith("1,024 tokens by yarn: {'rope_theta'")
    folder = run_recipe(recipe(f"model.tokenizer={tmp_path / 'tokenizer'}"))
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert (config.max_position_embeddings, config.rope_parameters["factor"]) == (1024, 4.0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 1024
    assert len(tokenizer("a b " * 400, truncation=True)["input_ids"]) > 256
    written = (folder / "recipe.yaml").read_text(encoding="utf-8")
    assert load_recipe(folder / "recipe.yaml").model.context_extension.method == "yarn" and "length: 1024" in written


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.context_extension.method=rope",), "model.context_extension.method"),
        (("model.config.max_position_embeddings=512",), "is set by model.context_extension too: remove one of the two"),
        (
            ("model={preset: mini-llama, tokenizer: 'builtin:bytes', context_extension: {method: ntk, length: 1024}}",),
            "extends what a checkpoint has learned",
        ),
    ],
)
def test_mistakes_in_a_recipe_are_named(recipe, overrides, said):
    with pytest.raises(RecipeError, match=said):
        recipe(*overrides)


def test_a_length_that_is_no_extension_ends_before_anything_is_loaded(recipe):
    with pytest.raises(UserError, match="is 200, and the model was trained for 256"):
        prepare(recipe("model.context_extension.length=200"))


def test_a_stage_is_planned_as_extended_before_the_model_exists(tmp_path):
    pipeline = load_pipeline("long-context", [f"train.output_dir={tmp_path}"])
    stage = pipeline["yarn"]
    plan = prepare(pipeline.planned(stage, []))
    assert plan.config.rope_parameters["original_max_position_embeddings"] == 128
    assert plan.config.max_position_embeddings == 512 and math.isclose(plan.config.rope_parameters["factor"], 4.0)
    assert json.loads(pipeline.resolved(stage).model.model_dump_json())["path"] == str(tmp_path / "short")
