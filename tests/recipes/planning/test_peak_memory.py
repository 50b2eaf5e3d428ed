"""Predicted peaks of training steps against what torch's allocator for CPUs really handed out."""

import gc
import json
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from anyformer.recipes.console import make_console
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.planning.memory import step_of
from anyformer.recipes.planning.step_setting import Device, setting_of
from anyformer.recipes.planning.subject import Subject, config_of
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import _Run
from anyformer.recipes.run_folder import RunFolder

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
SIZES |= {"vocab_size": 4096, "max_position_embeddings": 512}
LATENT = {"attention": "mla", "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 32, "num_key_value_heads": None}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "router_aux_loss_coef": 0.01}
BOTH = {"architecture": "encoder-decoder", "num_encoder_layers": 3, "decoder_start_token_id": 1}
TEXT = "the cat sat on the mat and went on to the other side of it "


def recipe_file(folder: Path, config: dict, objective: str, rows: str) -> Path:
    data = folder / "rows.jsonl"
    data.write_text(rows, encoding="utf-8")
    fields = json.dumps(SIZES | {"num_key_value_heads": 4} | config)
    file = folder / "recipe.yaml"
    file.write_text(
        f"""
model: {{preset: llama-2-7b, tokenizer: "builtin:bytes", config: {fields}}}
data: {{source: {data}, eval_fraction: 0}}
objective: {objective}
train:
  output_dir: {folder / "run"}
  max_steps: 2
  per_device_train_batch_size: 4
  save_strategy: "no"
  bf16: false
  gradient_checkpointing: false
eval: {{samples: 0}}
""",
        encoding="utf-8",
    )
    return file


def measured(recipe):
    """The most bytes that were allocated at a time from before the model was made to the end of two steps."""
    prepared = prepare(recipe)
    folder = RunFolder(Path(recipe.train["output_dir"]))
    folder.open(recipe.to_yaml(), resume=False, keep=False)
    run = _Run(recipe, prepared, folder, make_console(recipe))
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        model, adapter = run.ready(prepared.objective.begin(run.load(verify=False)), resume=False)
        prepared.objective.trainer(model, prepared.train.dataset, None, adapter).train()
    live = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, prepared


def predicted(recipe, prepared, length):
    config, _ = config_of(recipe, own_vocabulary=False)
    subject = Subject("test", recipe, config, metrics={"plan": prepared.plan.as_dict()})
    setting, _ = setting_of(subject, Device(), length=length)
    return step_of(setting).memory()


TEXTS = "".join(f'{{"text": "{TEXT * 12}"}}\n' for _ in range(40))


def pairs(source: str, target: str) -> str:
    """Rows of two lengths, so that the shorter ones are padded."""
    lengths = (TEXT * (3 if i % 2 else 2) for i in range(40))
    return "".join(f'{{"{source}": "{text}", "{target}": "{text}"}}\n' for text in lengths)


def preferences() -> str:
    """Rows of two lengths, of which the chosen answer is the longer one in half."""
    rows = []
    for number in range(40):
        chosen, rejected = (TEXT * 2, TEXT[::-1]) if number % 2 else (TEXT, TEXT[::-1] * 2)
        rows.append({"prompt": TEXT, "chosen": chosen, "rejected": rejected})
    return "".join(json.dumps(row) + "\n" for row in rows)


PAIRS, SOURCES = pairs("prompt", "completion"), pairs("source", "target")
CLASSES = "".join(f'{{"text": "{TEXT * (3 if i % 2 else 2)}", "label": "{i % 3}"}}\n' for i in range(40))
PRETRAIN = "{kind: pretrain, max_length: 128, packing: blocks}"
QUANTIZED = "model.quantization={load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true}"
SETTINGS = {
    "all weights": ({}, []),
    "rows": ({}, ["train.per_device_train_batch_size=16"]),
    "short rows": ({}, ["objective.max_length=32"]),
    "long rows": ({}, ["objective.max_length=512"]),
    "checkpointing": ({}, ["train.gradient_checkpointing=true", "train.per_device_train_batch_size=16"]),
    "accumulation": ({}, ["train.gradient_accumulation_steps=3"]),
    "eager": ({}, ["model.attn_implementation=eager"]),
    "tied": ({"tie_word_embeddings": True}, []),
    "whole logits": ({"loss_chunk_size": 0}, ["train.per_device_train_batch_size=16"]),
    "bf16 weights": ({}, ["model.dtype=bfloat16"]),
    "autocast": ({}, ["train.bf16=true", "train.per_device_train_batch_size=16"]),
    "sgd": ({}, ["train.optim=sgd"]),
    "adafactor": ({}, ["train.optim=adafactor"]),
    "muon": ({}, ["train.optim=muon"]),
    "lora": ({}, ["adapter.kind=lora"]),
    "lora, checkpointing": ({}, ["adapter.kind=lora", "train.gradient_checkpointing=true"]),
    "lora of some layers": (
        {},
        ["adapter.kind=lora", "adapter.target_modules=[q_proj]", "adapter.layers_to_transform=[1, 2]"],
    ),
    "qlora": ({}, ["adapter.kind=lora", QUANTIZED]),
    "8-bit base": ({}, ["adapter.kind=lora", "model.quantization={load_in_8bit: true}"]),
    "prefix": ({}, ["adapter.kind=prefix-tuning"]),
    "frozen parts": ({}, ["adapter={kind: freeze, train: [attention]}"]),
    "latent attention": (LATENT, []),
    "experts": (EXPERTS, []),
    "experts behind a dense layer": (EXPERTS | LATENT | {"first_k_dense_replace": 1, "num_hidden_layers": 6}, []),
    "windows": ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}, []),
}


def tokens_of(row) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    answers = [ids for name, ids in row.items() if name.endswith("_ids") and name != "prompt_ids"]
    return len(row["prompt_ids"]) + max(map(len, answers))


def check(recipe):
    if recipe.model.quantization:
        pytest.importorskip("bitsandbytes")
    peak, prepared = measured(recipe)
    memory = predicted(recipe, prepared, max(map(tokens_of, prepared.train.dataset)))
    assert peak > 10e6  # far above what a trainer's own tensors take
    assert memory.peak == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(("config", "overrides"), SETTINGS.values(), ids=SETTINGS.keys())
def test_peak_of_pretraining(tmp_path, config, overrides):
    recipe = load_recipe(recipe_file(tmp_path, config, PRETRAIN, TEXTS), overrides)
    check(recipe)


OTHERS = {
    "padded rows": ({}, "{kind: sft}", PAIRS, []),
    "padded rows, eager": ({}, "{kind: sft}", PAIRS, ["model.attn_implementation=eager"]),
    "masked tokens": ({"architecture": "encoder"}, "{kind: mlm, max_length: 128}", TEXTS, []),
    "classes": ({}, "{kind: classify}", CLASSES, []),
    "two stacks": (BOTH, "{kind: seq2seq}", SOURCES, []),
    "preferences": ({}, "{kind: dpo}", preferences(), []),
    "preferences, lora": ({}, "{kind: dpo}", preferences(), ["adapter.kind=lora"]),
    "single answers": ({}, "{kind: kto}", preferences(), []),
    "odds": ({}, "{kind: orpo}", preferences(), []),
    "odds, lora in 16 bits": ({}, "{kind: orpo}", preferences(), ["adapter.kind=lora", "model.dtype=bfloat16"]),
    "contrast, autocast": ({}, "{kind: cpo}", preferences(), ["train.bf16=true"]),
    "lengths": ({}, "{kind: simpo}", preferences(), []),
    "two stacks, checkpointing": (BOTH, "{kind: seq2seq}", SOURCES, ["train.gradient_checkpointing=true"]),
}


@pytest.mark.parametrize(("config", "objective", "rows", "overrides"), OTHERS.values(), ids=OTHERS.keys())
def test_peak_of_other_objectives(tmp_path, config, objective, rows, overrides):
    recipe = load_recipe(recipe_file(tmp_path, config, objective, rows), overrides)
    check(recipe)
