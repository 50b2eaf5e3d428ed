"""Objectives medusa, eagle and mtp: what is learned, what a run leaves, and drafts in `generate` and `chat`."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from recipe_files import fault
from transformers import AutoModel, AutoTokenizer, LlamaForCausalLM
from tuning import assert_equal_weights
from typer.testing import CliRunner

import anyformer
from anyformer.recipes.chat import chat
from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.prompts import pieces_of, tokenize_prompts
from anyformer.scripts.cli import app

KINDS = ("medusa", "eagle", "mtp")
WORDS = ("one", "two", "three", "four", "five", "the", "cat", "dog", "sat", "on")
TEXTS = [f"{a} {b} {c} {a} {b}" for a in WORDS[:4] for b in WORDS for c in WORDS[::4]]


@pytest.fixture(scope="module")
def make(tiny_checkpoint, tmp_path_factory):
    """A function: a recipe for a drafter of the tiny model, with overrides."""

    def recipe(kind: str, *overrides: str):
        folder = tmp_path_factory.mktemp(kind)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
        text = f"""
model: {{path: {tiny_checkpoint}}}
data: {{source: {rows}, eval_fraction: 0.3}}
objective: {{kind: {kind}, num_draft_tokens: 2, max_length: 8, max_new_tokens: 16}}
train:
  output_dir: {folder / "run"}
  max_steps: 60
  per_device_train_batch_size: 4
  learning_rate: 1e-2
  logging_steps: 20
  save_steps: 25
  seed: 7
eval: {{samples: 2, max_new_tokens: 12, batch_size: 4}}
"""
        path = folder / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return load_recipe(path, overrides)

    return recipe


@pytest.fixture(scope="module")
def runs(make):
    """The folders of a run of each kind, made when first asked for."""
    made: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in made:
            made[kind] = run_recipe(make(kind))
        return made[kind]

    return run


def metrics_of(folder: Path):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_a_drafter_that_has_learned(runs, tiny_checkpoint, kind):
    folder = runs(kind)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "drafters.py", "tokenizer.json", "README.md", "loss_curve.png"} <= names
    metrics = metrics_of(folder)
    before, after = metrics["before"], metrics["after"]
    assert after["loss"] < before["loss"] * 0.95 and after["tokens_a_pass"] > before["tokens_a_pass"]
    assert after["rows"] == before["rows"] > 0 and after["tokens"] == 16 * after["rows"]
    drafter = AutoModel.from_pretrained(folder)
    assert type(drafter).__name__ == "AnyformerDrafter" and drafter.config.kind == kind
    assert sum(p.numel() for p in drafter.parameters()) == metrics["plan"]["trainable"]
    used, base = metrics["in_use"], anyformer.from_hf(tiny_checkpoint)
    assert used["same_answers"] == used["prompts"] == 2 and used["tokens_a_pass"] > 1
    tokens = torch.randint(3, base.config.vocab_size, (1, 9))
    plain = base.generate(tokens, max_new_tokens=20, do_sample=False)
    assert base.generate(tokens, max_new_tokens=20, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "assistant_model=drafter" in card and f'anyformer generate {tiny_checkpoint} "..." --draft' in card
    assert used["words"] in card


def test_the_base_stays_as_it_is_and_its_answers_are_what_is_learned(make, tiny_checkpoint):
    recipe = make("medusa", "train.max_steps=3", "train.save_strategy=no")
    prepared = prepare(recipe)
    objective, base = prepared.objective, anyformer.from_hf(tiny_checkpoint)
    kept = {name: value.clone() for name, value in base.state_dict().items()}
    drafter = objective.begin(base)
    trainer = objective.trainer(drafter, prepared.train.dataset, None, None)
    trainer.train()
    assert all(torch.equal(kept[name], value) for name, value in base.state_dict().items())
    assert not any(parameter.requires_grad for parameter in base.parameters())
    assert sum(p.numel() for p in drafter.parameters()) == prepared.plan.trainable
    prompts = sorted(map(tuple, prepared.train.dataset["input_ids"]))
    assert len(trainer.train_dataset) == len(prompts) == prepared.train.report.rows_kept
    for row in trainer.train_dataset.select(range(0, len(prompts), 9)):
        learned = [label for label in row["labels"] if label != -100]
        ids = row["input_ids"][: -len(learned)]
        assert tuple(ids) in prompts and row["labels"][: len(ids)] == [-100] * len(ids)
        expected = []
        for _ in range(16):  # token by token, uncached, alone
            expected.append(base(torch.tensor([ids + expected])).logits[0, -1].argmax().item())
            if expected[-1] == objective.tokenizer.eos_token_id:
                break
        assert learned == expected == row["input_ids"][len(ids) :]


def test_the_figures_are_those_of_a_loop_over_rows(make):
    """Medusa's heads by hand: x + SiLU(W x) at a place, read by the base's head, drafts the tokens two places on."""
    prepared = prepare(make("medusa", "objective.answers=data", "~objective.max_new_tokens", "objective.max_length=24"))
    objective = prepared.objective
    drafter = objective.begin(anyformer.from_hf(objective.recipe.model.path))
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    figures = objective.measure(drafter, prepared.splits.eval, prepared.held_out)
    hits, count, losses = [0, 0], [0, 0], [0.0, 0.0]
    for row in prepared.held_out.dataset:
        ids = torch.tensor([row["input_ids"]])
        features = objective.base.model(ids).last_hidden_state[0]
        for place, block in enumerate(drafter.draft_head.blocks):
            states = features + torch.nn.functional.silu(features @ block.weight.T + block.bias)
            logits = (states @ objective.base.lm_head.weight.T)[: -2 - place]
            targets = ids[0, 2 + place :]
            hits[place] += (logits.argmax(-1) == targets).sum().item()
            losses[place] += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            count[place] += len(targets)
    first, second = (hit / number for hit, number in zip(hits, count, strict=True))
    assert [figures["accuracy_1"], figures["accuracy_2"]] == pytest.approx([first, second])
    assert figures["tokens_a_pass"] == pytest.approx(1 + first + first * second)
    mean = sum(0.8**k * loss / number for k, (loss, number) in enumerate(zip(losses, count, strict=True), 1))
    assert figures["loss"] == pytest.approx(mean)
    assert objective.held_rows.figures() == pytest.approx({name: figures[name] for name in objective.shown})


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_resume_is_bit_equal(make, interrupted, kind):
    given = ("train.max_steps=8", "train.save_steps=5", "eval.samples=0")
    whole, halted = run_recipe(make(kind, *given)), make(kind, *given)
    with interrupted():
        run_recipe(halted)
    resumed = run_recipe(halted, resume=True)
    assert_equal_weights(whole, resumed)
    assert metrics_of(resumed)["after"] == metrics_of(whole)["after"]


def test_prompts_of_texts_and_of_chats(tiny_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    for length, count in ((100, 1), (100, 3), (16, 2), (33, 2), (15, 4)):
        ids = list(range(length))
        found = pieces_of(ids, 16, count)
        assert len(found) == min(count, max(length // 16, 1)) and all(len(piece) == min(16, length) for piece in found)
        assert all(ids[piece[0] : piece[-1] + 1] == piece for piece in found)
        assert all(one[-1] < other[0] for one, other in pairwise(found))
    chats = [{"prompt": [{"role": "user", "content": text}]} for text in ("one", "one two three four five " * 8)]
    settings = {"max_length": 24, "max_new_tokens": 5, "prompts_per_text": 1}
    data = tokenize_prompts(chats, tokenizer, **settings)
    rendered = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(row["input_ids"]) for row in data.dataset] == [rendered]
    assert data.report.dropped == {"prompts longer than max_length": 1} and data.report.supervised_tokens == 5
    with pytest.raises(UserError, match=r"None of the 1 prompts has at most objective\.max_length=24 tokens"):
        tokenize_prompts(chats[1:], tokenizer, **settings)


# What is refused when the recipe is read


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("adapter: {kind: lora, r: 4}", "adapter.kind: lora would change the model"),
        ("model: {path: m, quantization: {load_in_4bit: true}}", "model.quantization: eagle reads the states"),
        (
            "model: {preset: mini-gpt, tokenizer: builtin:bytes}",
            "model.preset: eagle trains a drafter for a model that",
        ),
        ("data: {source: a.jsonl, truncation: split}", "data.truncation: 'split' has no effect"),
        ("objective: {kind: eagle, answers: data, max_new_tokens: 8}", "objective.max_new_tokens: has no effect with"),
        ("objective: {kind: eagle, num_draft_tokens: 0}", "objective.num_draft_tokens: must be at least 1"),
        ("train: {activation_checkpointing: true}", "train.activation_checkpointing: has no effect"),
        ("train: {label_smoothing_factor: 0.1}", "train.label_smoothing_factor: is not part"),
        ("data: {source: a.jsonl, streaming: true}", "data.streaming: eagle needs all rows"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(section, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"model": "model: {path: m}", "data": "data: {source: a.jsonl}", "objective": "objective: {kind: eagle}"}
    text = "\n".join((given | {section.partition(":")[0]: section}).values())
    line = text.splitlines().index(section) + 1
    assert fault(text).startswith(f"r.yaml:{line}: {told}")


def test_what_only_the_model_tells_is_refused(make, tiny, tmp_path, tiny_checkpoint):
    with pytest.raises(
        UserError, match=r"objective\.max_new_tokens: prompts of up to 8 tokens and 400 new ones do not"
    ):
        prepare(make("mtp", "objective.max_new_tokens=400"))
    tiny(architecture="encoder", head="masked_lm").save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has architecture 'encoder'; the objective trains decoder"):
        prepare(make("medusa", f"model.path={tmp_path}"))


# `generate` and `chat`


def told(*words: object, status: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    assert status == 0 or isinstance(result.exception, SystemExit)
    return result.stdout, result.stderr


@pytest.fixture(scope="module")
def small(tiny_checkpoint, tmp_path_factory):
    """A smaller model with the same tokens."""
    folder = tmp_path_factory.mktemp("small")
    config = LlamaForCausalLM.from_pretrained(tiny_checkpoint).config
    config.num_hidden_layers = 1
    config.max_position_embeddings = 128
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(folder)
    return folder


PROMPTS = ("one two", "the cat sat on the")


def test_drafted_answers_are_the_same_and_what_came_of_drafts_is_told(runs, small, tiny_checkpoint):
    asked = ("generate", tiny_checkpoint, *PROMPTS, "--max-new-tokens", 12)
    plain, said = told(*asked)
    assert "Drafts" not in said
    for draft in (runs("medusa"), runs("eagle"), small, "lookup"):
        answers, said = told(*asked, "--draft", draft)
        assert answers == plain
        assert "Drafts: 24 tokens in" in said and "a pass;" in said and "drafted tokens accepted" in said
    sampled = [told(*asked, "--draft", runs("mtp"), "--temperature", 1, "--seed", seed)[0] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_chat_with_drafts(runs, tiny_checkpoint, capsys):
    said = []
    for options in ({}, {"draft": str(runs("medusa"))}):
        typed = iter(["one two", "three", "/exit"])
        capsys.readouterr()
        chat(str(tiny_checkpoint), read=lambda prompt, typed=typed: next(typed), max_new_tokens=8, **options)
        said.append(capsys.readouterr().out)
    assert said[1].startswith(said[0]) and "Drafts: 16 tokens in" in said[1].removeprefix(said[0])


def test_what_cannot_draft_is_told(runs, small, tiny, tiny_checkpoint, tmp_path):
    def refused(model, draft, status=2):
        return told("generate", model, "one", "--draft", draft, status=status)[1]

    assert "this drafter was made for another base" in refused(small, runs("medusa"))
    assert "is a drafter, which writes nothing by itself" in told("generate", runs("medusa"), "one", status=2)[1]
    assert "absent: no such folder or file" in refused(tiny_checkpoint, tmp_path / "absent")
    other = tmp_path / "other"
    tiny().save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.save_pretrained(other)
    assert "has other tokens than the model" in refused(tiny_checkpoint, other)
    both = tmp_path / "both"
    tiny(architecture="encoder-decoder", head="seq2seq_lm", vocab_size=len(tokenizer)).save_pretrained(both)
    tokenizer.save_pretrained(both)
    assert "drafts are for decoders" in refused(both, "lookup")
    assert "is an encoder-decoder" in refused(tiny_checkpoint, both)
    long = "one two three four five " * 30  # more than the smaller model has places for
    assert (
        "and the model has positions for 127" in told("generate", tiny_checkpoint, long, "--draft", small, status=2)[1]
    )
