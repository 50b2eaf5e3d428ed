"""Recipes on tiny new models, for the objectives that need no language model."""

import json
from pathlib import Path

from anyformer.recipes.loading import load_recipe
from anyformer.recipes.models import load_model, with_head
from anyformer.recipes.prepare import prepare

SHAPES = ("decoder", "encoder", "encoder-decoder")


def write_recipe(folder: Path, objective: str, rows: list[dict], *, shape: str = "encoder", **sizes: int):
    """A function: a recipe on `rows`, a tiny model of a shape and the byte tokenizer, with overrides."""
    fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
    fields |= {"initializer_range": 0.1, "hidden_dropout": 0.1} | sizes
    preset = folder / "tiny.yaml"
    preset.write_text(json.dumps({"architecture": shape, "vocab_size": 260} | fields), encoding="utf-8")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = folder / "recipe.yaml"
    file.write_text(
        f"""
model: {{preset: {preset}, tokenizer: "builtin:bytes"}}
data: {{source: {data}, eval_fraction: 0.25}}
objective: {{kind: {objective}}}
train:
  output_dir: {folder / "run"}
  max_steps: 30
  per_device_train_batch_size: 8
  learning_rate: 1e-2
  logging_steps: 10
  save_strategy: "no"
  bf16: false
  seed: 3
eval: {{samples: 2}}
""",
        encoding="utf-8",
    )
    return lambda *overrides: load_recipe(file, overrides)


def built(recipe):
    """What is prepared of a recipe, its model, and its trainer."""
    prepared = prepare(recipe)
    seed, head = prepared.arguments.seed, prepared.objective.head
    model, _ = load_model(recipe.model, prepared.config, seed=seed, head=head)
    model = with_head(model, prepared.config, head, seed=seed)
    held_out = prepared.held_out.dataset if prepared.held_out else None
    return prepared, model, prepared.objective.trainer(model, prepared.train.dataset, held_out, None)


def first_batch(trainer):
    """The first training batch, and the trainer's count of its labels."""
    batch = next(iter(trainer.get_train_dataloader()))
    return batch, trainer._get_num_items_in_batch([batch], "cpu")


def metrics_of(folder: Path):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
