"""What a recipe may not ask of an adapter: told when it is read, or before a weight is loaded."""

import pytest
from recipe_files import GOOD, MERGED, SOFT, fault, faults, write

from anyformer.recipes.adapters import (
    plan_adapter,
)
from anyformer.recipes.adapters.checks import NO_SOFT_PROMPTS, WITH_SOFT_PROMPTS
from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.objectives.sft import SupervisedTuning
from anyformer.recipes.run import run_recipe
from anyformer.recipes.schema import OBJECTIVES

REFUSED = [
    ("{kind: lora, target_modules: [q_proj], target_parts: [mlp]}", "adapter.target_parts: target_modules names"),
    ("{kind: lora, target_parts: [experts], lora_dropout: 0.1}", "adapter.target_parts: experts are stacked"),
    ("{kind: lora, target_parts: [router]}", "adapter.target_parts.0: must be attention, mlp or experts"),
    ("{kind: lora, lora_plus_lr_ratio: 0.5}", "adapter.lora_plus_lr_ratio: must be at least 1"),
    ("{kind: lora, lora_plus_lr_embedding: 0.5}", "adapter.lora_plus_lr_embedding: has no meaning without"),
    ("{kind: prompt-tuning, merge: true}", "adapter.merge: a soft prompt changes no weight"),
    ("{kind: prompt-tuning, num_virtual_tokens: 0}", "adapter.num_virtual_tokens: must be at least 1"),
    ("{kind: prompt-tuning, num_layers: 3}", "adapter.num_layers: is read from the model"),
    ("{kind: prompt-tuning, prompt_tuning_init: TEXT}", "adapter.prompt_tuning_init_text: is missing"),
    ("{kind: prompt-tuning, prompt_tuning_init_text: a}", "adapter.prompt_tuning_init_text: has no meaning"),
    ("{kind: prompt-tuning, tokenizer_name_or_path: a}", "adapter.tokenizer_name_or_path: is model.tokenizer"),
    ("{kind: prompt-tuning, virtual_tokens: 3}", "unknown key; did you mean 'num_virtual_tokens'?"),
    ("{kind: p-tuning, encoder_num_layers: 3}", "adapter.encoder_num_layers: only the LSTM has it"),
    ("{kind: prefix-tuning, encoder_hidden_size: 3}", "adapter.encoder_hidden_size: has no meaning unless"),
    ("{kind: prefix-tuning, init_weights: one}", "adapter.init_weights: must be zero"),
    ("{kind: ia3, target_modules: [k_proj]}", "adapter.feedforward_modules: target_modules is given"),
    ("{kind: ia3, feedforward_modules: [k_proj]}", "adapter.target_modules: feedforward_modules is given"),
    ("{kind: ia3, target_modules: [a], feedforward_modules: [b]}", "adapter.feedforward_modules: names b, which"),
    ("{kind: freeze}", "adapter.train: is missing"),
    ("{kind: freeze, train: []}", "adapter.train: is empty"),
    ("{kind: freeze, train: [a], merge: true}", "adapter.merge: unknown key"),
    ("{kind: prompt-tuning}\nobjective: {kind: classify}", "adapter.kind: prompt-tuning is not offered with"),
    ("{path: /nowhere}", "adapter.path: /nowhere holds no adapter_config.json"),
]


@pytest.mark.parametrize(("section", "message"), REFUSED, ids=[c[0] for c in REFUSED])
def test_what_makes_no_sense_is_refused_with_the_key(section, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in fault(GOOD + f"adapter: {section}\n")


# These take no adapter at all, which tests/recipes/test_draft_heads.py looks at.
DRAFTERS = {"medusa", "eagle", "mtp"}


@pytest.mark.parametrize("objective", sorted(set(OBJECTIVES) - set(WITH_SOFT_PROMPTS) - DRAFTERS))
def test_an_objective_without_soft_prompts_says_why(objective, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = {
        "distill": ", teacher: a/b",
        "grpo": ", reward: pep257",
        "rloo": ", reward: pep257",
        "ppo": ", reward: pep257",
    }
    given = GOOD + f"adapter: {{kind: prompt-tuning}}\nobjective: {{kind: {objective}{own.get(objective, '')}}}\n"
    said = "\n".join(faults(given))
    assert f"not offered with objective {objective}: {NO_SOFT_PROMPTS[objective]}; choose lora" in said


@pytest.mark.parametrize("kind", ["prompt-tuning", "p-tuning", "prefix-tuning"])
def test_soft_prompts_of_an_encoder_decoder_are_not_packed(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packed = f"adapter: {{kind: {kind}}}\ntrain: {{packing: true}}\n"
    said = fault(f"data: {{source: a.jsonl}}\nmodel: {{preset: t5-base, tokenizer: t}}\n{packed}")
    assert "train.packing: PEFT puts a soft prompt before the first pair" in said
    assert load_recipe(write(GOOD + packed)).train["packing"] is True


@pytest.mark.parametrize(
    "model", ["{preset: deepseek-v3, tokenizer: t}", "{preset: gpt2, tokenizer: t, config: {attention: mla}}"]
)
def test_prefixes_for_latent_attention_are_refused(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = fault(f"data: {{source: a.jsonl}}\nmodel: {model}\nadapter: {{kind: prefix-tuning}}\n")
    assert "adapter.kind: attention mla caches one latent a token" in said


LATE = [
    ("{kind: lora, target_parts: [experts]}", "the model has no experts"),
    ("{kind: freeze, train: [nroms]}", r"no parameter is meant by 'nroms', did you mean 'norms'\?"),
    ("{kind: ia3, target_modules: [k_porj], feedforward_modules: []}", "names 'k_porj', did you mean 'k_proj'"),
    ("{kind: prompt-tuning, modules_to_save: [nothing]}", "modules_to_save names 'nothing'"),
    ("{kind: lora, r: 4, init_lora_weights: eva}", "init_lora_weights: eva takes"),
    ("{kind: lora, rank_pattern: {qproj: 2}}", "rank_pattern names 'qproj', which is no .* did you mean 'q_proj'"),
    ("{kind: lora, alpha_pattern: {k_proj: 2}, target_modules: [q_proj]}", "alpha_pattern names 'k_proj', which is no"),
    ("{kind: lora, exclude_modules: [k_porj]}", "exclude_modules names 'k_porj', .* did you mean 'k_proj'"),
    ("{kind: lora, exclude_modules: '.*zzz'}", r"exclude_modules '\.\*zzz.* matches no module"),
    ("{kind: lora, bias: all}", "bias is 'all', and the model has no biases: leave it out"),
    ("{kind: lora, bias: lora_only}", "bias is 'lora_only', and the adapted modules have no biases"),
    ("{kind: lora, target_modules: [q_proj], layers_to_transform: [0, 7]}", "names 7, .* adapted are 0"),
    ("{kind: lora, target_modules: all}", "target_modules: 'all' is no module: write target_modules: all-linear"),
    ("{kind: lora, target_modules: [all]}", "write target_modules: all-linear"),
    ("{kind: prompt-tuning, num_virtual_tokens: 300}", "300 of the model's 256 positions|takes 300 of them"),
]


@pytest.mark.parametrize(("adapter", "message"), LATE, ids=[c[0] for c in LATE])
def test_what_the_model_lacks_is_refused_before_a_weight_is_loaded(recipe, monkeypatch, adapter, message):
    monkeypatch.setattr("anyformer.recipes.models.load_model", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(UserError, match=message):
        run_recipe(recipe(f"adapter={adapter}"))


WITH_EFFECT = [
    "{kind: lora, rank_pattern: {q_proj: 2, 'layers.0.self_attn.k_proj': 2}, alpha_pattern: {'.*_proj': 4}}",
    "{kind: lora, exclude_modules: [layers.0.self_attn.k_proj, lm_head]}",
    "{kind: lora, exclude_modules: '.*k_proj'}",
    "{kind: lora, target_modules: [q_proj], layers_to_transform: [0, 1]}",
    "{kind: lora, target_modules: [q_proj], layers_to_transform: 1, layers_pattern: layers}",
]


@pytest.mark.parametrize("adapter", WITH_EFFECT)
def test_keys_that_reach_something_are_taken(recipe, tiny, adapter):
    plan_adapter(tiny().config, recipe(f"adapter={adapter}").adapter, SupervisedTuning)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_are_there_are_trained(recipe, tiny, bias):
    config = tiny(attention_bias=True).config
    plan = plan_adapter(config, recipe(f"adapter={{kind: lora, bias: {bias}}}").adapter, SupervisedTuning)
    assert any(name.endswith("q_proj.base_layer.bias") for name in plan.names)


def test_a_soft_prompt_is_pushed_only_onto_a_base_that_others_have(recipe):
    with pytest.raises(UserError, match=r"hub\.repo: a soft prompt is pushed without its base.*adapter that merges"):
        run_recipe(recipe(f"adapter={SOFT['prompt-tuning']}", "hub={repo: me/it}"))


def test_recipes_of_all_kinds_come_back_from_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sections = [*SOFT.values(), *MERGED.values(), "{kind: freeze, train: [head]}", "{kind: none}"]
    for number, section in enumerate(sections):
        loaded = load_recipe(write(GOOD + f"adapter: {section}\n", f"{number}.yaml"))
        assert load_recipe(write(loaded.to_yaml(), f"again{number}.yaml")) == loaded
