"""Objectives on a tiny model, built as a run builds them, without its folder."""

from pathlib import Path

from safetensors.torch import load_file

from anyformer.recipes.adapters import peft_config
from anyformer.recipes.arguments import training_arguments
from anyformer.recipes.data import DataReport, Splits
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.models import config_and_tokenizer, load_model, with_head
from anyformer.recipes.objectives import objective_class
from anyformer.recipes.schema import OBJECTIVES

LORA = "adapter={kind: lora, r: 4, target_modules: all-linear}"


def assert_equal_weights(first: Path, second: Path) -> None:
    """Two run folders hold the same model, or the same adapter, to the last bit."""
    name = "model.safetensors" if (first / "model.safetensors").is_file() else "adapter_model.safetensors"
    expected, got = load_file(first / name), load_file(second / name)
    assert expected.keys() == got.keys()
    assert all(expected[name].equal(got[name]) for name in expected)


def message(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def chat_pair(question: str, good: str, bad: str) -> dict:
    return {
        "prompt": message("user", question),
        "chosen": message("assistant", good),
        "rejected": message("assistant", bad),
    }


PAIRS = [
    chat_pair("where is the cat", "on the mat", "the dog sat on the log"),
    chat_pair("count from two", "two three", "five"),
    chat_pair("one two", "three four five", "one"),
    chat_pair("and the dog", "the dog sat on the log, the log", "on the mat"),
    chat_pair("what", "the cat", "four four four"),
]


def objective_of(kind: str, checkpoint: Path, folder: Path, *overrides: str):
    """An objective with its trainer's arguments; overrides as on the command line."""
    text = f"""
model: {{path: {checkpoint}}}
data: {{source: rows.jsonl}}
objective: {{kind: {kind}}}
train:
  output_dir: {folder / "run"}
  max_length: 64
  per_device_train_batch_size: 4
  gradient_checkpointing: false
  use_cpu: true
  bf16: false
  save_strategy: "no"
  seed: 7
"""
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    recipe = load_recipe(path, overrides)
    entry = OBJECTIVES[kind]
    arguments = training_arguments(entry.config, entry.defaults | recipe.train)
    config, tokenizer = config_and_tokenizer(recipe.model, entry.shapes)
    objective = objective_class(kind)(recipe, arguments, config, tokenizer)
    objective.configure(Splits([], [], DataReport()))
    return objective


def model_of(objective):
    """The model as a run loads it."""
    seed = objective.arguments.seed
    model, _ = load_model(objective.recipe.model, objective.config, seed=seed, head=objective.head)
    return with_head(model, objective.config, objective.head, seed=seed)


def trainer_of(objective, rows, model=None, held_out=None):
    """The trainer on `rows`, with the recipe's adapter."""
    train = objective.prepare(rows).dataset
    held = objective.prepare(held_out).dataset if held_out else None
    model = model_of(objective) if model is None else model
    fresh = not hasattr(model, "peft_config")
    adapter = peft_config(objective.recipe.adapter, objective, model) if fresh else None
    return objective.trainer(model, train, held, adapter)


def first_batch(trainer):
    return next(iter(trainer.get_train_dataloader()))
