"""Every kind of adapter from a recipe: trained, measured, saved, opened again, gone on from, or refused."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from recipe_files import MERGED, SOFT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from tuning import assert_equal_weights

import anyformer
from anyformer.recipes.adapters import (
    Watch,
    fit_vocabulary,
    merge,
    open_adapter,
    plan_adapter,
    put_on,
    save_adapter,
    train_in_place,
)
from anyformer.recipes.adapters.attach import peft_config
from anyformer.recipes.adapters.watch import use_lora_plus
from anyformer.recipes.errors import UserError
from anyformer.recipes.hub import load_snippet
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.models import load_pretrained
from anyformer.recipes.objectives.sft import SupervisedTuning
from anyformer.recipes.run import run_recipe

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
RATES = {"prompt-tuning": 0.3, "prefix-tuning": 0.3, "ia3": 0.1}
LORA = "{kind: lora, r: 4, target_modules: all-linear}"


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint):
    """A function: a recipe with overrides, over 48 counting rows: `count from two` -> `two three four`."""
    lines = [
        json.dumps({"prompt": f"count {i} from {WORDS[i % 7]}", "completion": " ".join(WORDS[i % 7 : i % 7 + 3])})
        for i in range(48)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    text = f"""
model: {{path: {tiny_checkpoint}, verify_import: false}}
adapter: {LORA}
data: {{source: {tmp_path / "rows.jsonl"}, eval_fraction: 0.2}}
train:
  output_dir: {tmp_path / "run"}
  max_steps: 8
  per_device_train_batch_size: 4
  learning_rate: 2e-2
  max_length: 64
  logging_steps: 4
  save_strategy: "no"
  gradient_checkpointing: false
  seed: 7
eval: {{samples: 1, max_new_tokens: 4}}
logging: {{plot: false}}
"""
    path.write_text(text, encoding="utf-8")
    return lambda *overrides: load_recipe(path, overrides)


@pytest.fixture
def run(recipe, tmp_path):
    """A function: run a recipe, into a folder of that name, and return folder and metrics."""

    def execute(*overrides, name="run", **options):
        folder = run_recipe(recipe(*overrides, f"train.output_dir={tmp_path / name}"), **options)
        return folder, json.loads((folder / "metrics.json").read_text(encoding="utf-8"))

    return execute


def rate(adapter: str) -> str:
    kind = re.search(r"kind: ([\w-]+)", adapter)[1]
    return f"train.learning_rate={RATES.get(kind, 2e-2)}"


def prompts(folder: Path) -> dict[str, torch.Tensor]:
    """Two prompts of unequal length, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return dict(tokenizer(["count 3 from four", "count from one"], padding=True, return_tensors="pt"))


def greedy(model, inputs, steps=5):
    """Greedy tokens without any cache, row by row without padding."""
    rows = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        row = ids[mask.bool()][None]
        start = row.shape[1]
        for _ in range(steps):
            with torch.no_grad():
                logits = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits
            row = torch.cat([row, logits[:, -1:].argmax(-1)], dim=1)
        rows.append(row[0, start:])
    return torch.stack(rows)


@pytest.mark.parametrize("name", SOFT)
def test_a_soft_prompt_is_trained_kept_and_opened(run, tiny_checkpoint, tmp_path, name):
    """With gradient checkpointing; the folder names its base, and generation behind padding is the plain forward's."""
    folder, metrics = run(f"adapter={SOFT[name]}", rate(SOFT[name]), "train.gradient_checkpointing=true")
    assert metrics["after"]["loss"] < metrics["before"]["loss"]
    assert metrics["adapter"]["virtual_tokens"] == 6 and not metrics["adapter"]["adapted"]
    assert metrics["finished"] and not (folder / "config.json").exists() and not (folder / "adapter").exists()
    held = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert held["base_model_name_or_path"] == str(tiny_checkpoint) and held["inference_mode"]
    model = load_pretrained(str(folder))
    assert isinstance(model, PeftModel) and type(model.get_base_model()).__name__ == "AnyformerForCausalLM"
    inputs = prompts(folder)
    generated = model.generate(**inputs, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generated[:, inputs["input_ids"].shape[1] :].equal(greedy(model, inputs))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "soft prompt" in card and f'anyformer.from_hf("{tiny_checkpoint}")' in card
    assert load_snippet(folder, "a/b") == f'PeftModel.from_pretrained(anyformer.from_hf("{tiny_checkpoint}"), "a/b")'


@pytest.mark.parametrize("name", MERGED)
def test_a_merged_model_is_the_adapter_on_its_base(run, tiny_checkpoint, name):
    folder, metrics = run(f"adapter={MERGED[name]}", rate(MERGED[name]))
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 0.01
    merged = AutoModelForCausalLM.from_pretrained(folder)
    adapted = put_on(anyformer.from_hf(tiny_checkpoint), folder / "adapter")
    inputs = prompts(folder)
    expected = adapted(**inputs).logits
    torch.testing.assert_close(merged(**inputs).logits, expected, rtol=0, atol=1e-5)
    generated = merged.generate(**inputs, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generated[:, inputs["input_ids"].shape[1] :].equal(greedy(adapted, inputs))


@pytest.mark.parametrize(
    "adapter", ["{kind: ia3, merge: false}", "{kind: lora, r: 4, target_parts: [attention], merge: false}"]
)
def test_an_adapter_beside_its_base_opens_as_any_model(run, adapter):
    folder, _ = run(f"adapter={adapter}", "train.gradient_checkpointing=true")
    model, inputs = AutoModelForCausalLM.from_pretrained(folder).eval(), prompts(folder)
    ours = open_adapter(folder, "AutoModelForCausalLM")
    torch.testing.assert_close(model(**inputs).logits, ours(**inputs).logits, rtol=0, atol=1e-5)


def test_freezing_trains_what_it_names_and_nothing_else(run, tiny_checkpoint):
    folder, metrics = run("adapter={kind: freeze, train: [norms, layers.1., '*layers.0.mlp.up_proj.weight']}")
    before = anyformer.from_hf(tiny_checkpoint).state_dict()
    after = load_file(folder / "model.safetensors")
    changed = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    named = {n for n in after if "norm" in n or ".layers.1." in n or n == "model.layers.0.mlp.up_proj.weight"}
    assert changed == named
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 0.1
    assert metrics["adapter"]["frozen"].keys() == {"embeddings", "head"}
    assert metrics["plan"]["trainable"] == sum(after[name].numel() for name in named)


def test_pieces_of_names_end_at_dots(tiny):
    adapter = SimpleNamespace(kind="freeze", train=["layers.1"], in_place=True, path=None, virtual_tokens=0)
    plan = plan_adapter(tiny(num_hidden_layers=11).config, adapter, SupervisedTuning)
    assert plan.names and all(".layers.1." in name for name in plan.names)  # and not layer 10


def test_a_head_that_is_tied_is_the_embedding(tiny):
    adapter = SimpleNamespace(kind="freeze", train=["head"], in_place=True, path=None, virtual_tokens=0)
    model = tiny(tie_word_embeddings=True)
    assert plan_adapter(model.config, adapter, SupervisedTuning).names == {"model.embed_tokens.weight"}
    train_in_place(model, adapter)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["model.embed_tokens.weight"]


def test_a_recipes_lists_stay_as_they_were_written(tiny, recipe):
    """PEFT adds the layers of a task to them in place."""
    adapter = recipe("adapter={kind: lora, modules_to_save: [embed_tokens]}").adapter
    task = SimpleNamespace(head="sequence_classification", task_type="SEQ_CLS")
    plan = plan_adapter(tiny(head="sequence_classification", num_labels=3).config, adapter, task)
    assert plan.whole.keys() == {"embeddings", "head"}
    assert adapter.modules_to_save == ["embed_tokens"]


# Going on


@pytest.mark.parametrize("name", ["lora", "ia3", "pissa", *SOFT])
def test_going_on_from_an_adapter_starts_where_it_ended(run, name):
    adapter = SOFT.get(name) or MERGED.get(name) or LORA
    first, metrics = run(f"adapter={adapter}", rate(adapter), name="first")
    folder = first / "adapter" if (first / "adapter").is_dir() else first
    _, went_on = run(f"adapter={{path: {folder}}}", rate(adapter), name="second")
    # Merged and unmerged weights round otherwise, and PiSSA splits the base's weights anew.
    assert went_on["before"]["loss"] == pytest.approx(metrics["after"]["loss"], abs=1e-9 if name in SOFT else 1e-6)
    assert went_on["after"]["loss"] < went_on["before"]["loss"]
    assert went_on["adapter"]["kind"] == metrics["adapter"]["kind"]
    assert went_on["adapter"]["trainable"] == metrics["adapter"]["trainable"]


def test_a_classifier_goes_on_with_its_layer(run, tmp_path):
    rows = [json.dumps({"text": f"count from {WORDS[i % 7]}", "label": "ab"[i % 7 > 3]}) for i in range(40)]
    (tmp_path / "labels.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    common = ("objective={kind: classify}", f"data.source={tmp_path / 'labels.jsonl'}", "~train.max_length")
    first, metrics = run(*common, name="first")
    _, went_on = run(
        *common, f"adapter={{path: {first / 'adapter'}}}", "train.activation_checkpointing=true", name="on"
    )
    assert went_on["before"]["loss"] == pytest.approx(metrics["after"]["loss"], abs=1e-6)  # merged and not
    assert went_on["after"]["loss"] < went_on["before"]["loss"]
    assert went_on["adapter"]["whole"] == metrics["adapter"]["whole"] == {"head": 2 * 32}


@pytest.mark.parametrize("name", ["ia3", "lora-plus", "prompt-tuning", "p-tuning-lstm", "prefix-projected"])
def test_resume_is_bit_equal(run, name, interrupted, tmp_path):
    adapter = SOFT.get(name) or MERGED[name]
    saving = ("train.save_strategy=steps", "train.save_steps=5", "model.config={attention_dropout: 0.1}")
    common = (f"adapter={adapter}", rate(adapter), *saving, "eval.samples=0")
    whole, _ = run(*common, name="whole")

    with interrupted():
        run(*common, name="halted")
    halted, _ = run(*common, name="halted", resume=True)
    assert_equal_weights(whole, halted)


def test_a_prompt_without_its_network_goes_on_as_vectors(run):
    first, metrics = run(f"adapter={SOFT['p-tuning']}", name="first")
    (first / "prompt_encoder.safetensors").unlink()
    _, went_on = run(f"adapter={{path: {first}}}", "train.learning_rate=0.3", name="second")
    assert went_on["before"]["loss"] == pytest.approx(metrics["after"]["loss"], abs=1e-9)
    assert went_on["adapter"]["trainable"] == 6 * 32  # the vectors
    assert went_on["after"]["loss"] < went_on["before"]["loss"]


def test_what_is_said_beside_a_path_must_agree_with_it(run, recipe, tmp_path):
    first, _ = run("train.max_steps=1", name="first")
    folder = first / "adapter"
    assert recipe(f"adapter={{path: {folder}, r: 4}}").adapter.kind == "lora"
    for wrong, message in (
        (f"{{path: {folder}, kind: ia3}}", r"adapter\.kind: .* holds an adapter of kind lora: write lora, or leave"),
        (f"{{path: {folder}, r: 8}}", r"adapter\.r: the adapter in .* was made with 4"),
        (f"{{path: {folder}, target_parts: [mlp]}}", r"adapter\.target_parts: .* has its places already"),
        (f"{{path: {tmp_path}}}", r"adapter\.path: .* holds no adapter_config\.json"),
        (f"{{kind: none, path: {folder}}}", r"adapter\.path: unknown key"),
    ):
        with pytest.raises(UserError, match=message):
            recipe(f"adapter={wrong}")
    with pytest.raises(UserError, match=r"adapter\.path: .* does not fit the model"):
        run(f"adapter={{path: {folder}}}", *SCRATCH, name="second")


SCRATCH = (
    "~model.path",
    "model.preset=smollm2-135m",
    "model.config={num_hidden_layers: 2, hidden_size: 24, intermediate_size: 32, num_attention_heads: 3, "
    "num_key_value_heads: 1}",
)


@pytest.fixture(autouse=True)
def scratch_tokenizer(tiny_checkpoint, monkeypatch):
    """A preset takes its tokenizer from the tiny checkpoint."""
    monkeypatch.setattr(f"{__name__}.SCRATCH", (*SCRATCH[:3], f"model.tokenizer={tiny_checkpoint}"))


# Starts and optimiser


def test_a_prompt_may_start_from_a_text(run, recipe, tiny_checkpoint):
    text = "{kind: prompt-tuning, num_virtual_tokens: 9, prompt_tuning_init: TEXT, prompt_tuning_init_text: one two}"
    section = recipe(f"adapter={text}").adapter
    model = anyformer.from_hf(tiny_checkpoint)
    started = get_peft_model(model, peft_config(section, SupervisedTuning, model, str(tiny_checkpoint)))
    ids = AutoTokenizer.from_pretrained(tiny_checkpoint)("one two")["input_ids"]
    expected = model.get_input_embeddings()(torch.tensor((ids * 9)[:9]))
    assert started.prompt_encoder["default"].embedding.weight.equal(expected)
    folder, metrics = run(f"adapter={text}", "train.learning_rate=0.1")
    assert metrics["after"]["loss"] < metrics["before"]["loss"]
    held = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert held["tokenizer_name_or_path"] is None and held["prompt_tuning_init"] == "RANDOM"


def test_lora_plus_moves_b_by_its_ratio(tiny, tmp_path):
    """One step of plain gradient descent: every matrix B by ratio x rate x gradient, the rest by rate x gradient."""
    model = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2))
    options = {"use_cpu": True, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 1}
    options |= {"report_to": "none", "max_grad_norm": 0.0, "save_strategy": "no", "disable_tqdm": True}
    rows = [{"input_ids": list(range(3, 11)), "labels": list(range(3, 11))}]
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=rows)
    use_lora_plus(trainer, SimpleNamespace(lora_plus_lr_ratio=8, lora_plus_lr_embedding=None))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    batch = {name: torch.tensor([values]) for name, values in rows[0].items()}
    model(**batch).loss.backward()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = {n: p.detach() - 0.1 * (8 if "lora_B" in n else 1) * p.grad for n, p in named.items()}
    model.zero_grad()
    trainer.train()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-6)


# Heads that are tied, tokens that were added


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens", "lm_head"]], ids=["head", "both"])
def test_a_trained_head_of_a_tied_model_is_untied(tiny, tmp_path, saved):
    model = get_peft_model(
        tiny(tie_word_embeddings=True),
        LoraConfig(target_modules=["q_proj"], modules_to_save=saved, task_type="CAUSAL_LM"),
    ).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    tokens = torch.arange(3, 15)[None]
    expected = model(input_ids=tokens).logits
    merged = merge(model)
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=0, atol=1e-5)
    merged.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"] is False
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=1e-5)
    assert again.lm_head.weight is not again.model.embed_tokens.weight


def test_weights_that_stay_tied_stay_so_in_the_config(tiny, tmp_path):
    options = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    model = get_peft_model(tiny(tie_word_embeddings=True), LoraConfig(target_modules=["q_proj"], **options))
    merged = merge(model)
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.tie_word_embeddings and again.lm_head.weight is again.model.embed_tokens.weight
    tokens = torch.arange(3, 15)[None]
    torch.testing.assert_close(again(tokens).logits, merged(tokens).logits, rtol=0, atol=1e-5)


@pytest.fixture(params=["modules", "layers", "tokens"])
def with_new_tokens(request, tiny_checkpoint, tmp_path):
    """The folder of an adapter that was made after three tokens were added, and its logits."""
    model = anyformer.from_hf(tiny_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    new = [f"<new{i}>" for i in range(3)]
    tokenizer.add_tokens(new)
    fit_vocabulary(model, len(tokenizer))
    torch.nn.init.normal_(model.get_input_embeddings().weight.data[-3:], std=0.1)
    options = {
        "modules": {"modules_to_save": ["embed_tokens", "lm_head"]},
        "layers": {},
        "tokens": {"trainable_token_indices": {"embed_tokens": tokenizer.convert_tokens_to_ids(new)}},
    }[request.param]
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM", **options)).eval()
    torch.nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight)
    folder = tmp_path / "adapter"
    save_adapter(adapted, folder, str(tiny_checkpoint), embeddings=request.param == "layers")
    tokenizer.save_pretrained(folder)
    tokens = torch.tensor([[5, len(tokenizer) - 2, 7, len(tokenizer) - 1]])
    return folder, tokens, adapted(input_ids=tokens).logits.detach(), request.param


def test_an_adapter_opens_after_tokens_were_added(with_new_tokens, tiny_checkpoint):
    folder, tokens, expected, how = with_new_tokens
    before = anyformer.from_hf(tiny_checkpoint).get_input_embeddings().weight
    model = load_pretrained(str(folder))
    got = model(input_ids=tokens).logits
    known = before.shape[0] if how == "tokens" else None  # the head's new rows are not in that adapter
    torch.testing.assert_close(got[..., :known], expected[..., :known], rtol=0, atol=1e-5)
    table = model.get_input_embeddings().weight
    assert table.shape[0] == before.shape[0] + 3 and table[: before.shape[0]].equal(before)


def test_a_run_goes_on_after_tokens_were_added(with_new_tokens, run, tiny_checkpoint):
    folder, tokens, _, how = with_new_tokens
    before = anyformer.from_hf(tiny_checkpoint).get_input_embeddings().weight
    trained, _ = run(f"adapter={{path: {folder}}}", "train.max_steps=2")
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert model.config.vocab_size == before.shape[0] + 3 == len(AutoTokenizer.from_pretrained(trained))
    if how != "modules":  # there the table is trained whole
        assert model.get_input_embeddings().weight[: before.shape[0]].equal(before)
    again = load_pretrained(str(trained / "adapter"))  # by itself, on the base as it is published
    reopened, kept = again(input_ids=tokens).logits, model(tokens).logits
    known = before.shape[0] if how == "tokens" else None
    torch.testing.assert_close(reopened[..., :known], kept[..., :known], rtol=0, atol=1e-5)


def test_an_adapter_of_a_shorter_vocabulary_is_refused(run, tiny, tmp_path):
    options = {"modules_to_save": ["embed_tokens"], "task_type": "CAUSAL_LM"}
    save_adapter(get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"], **options)), tmp_path / "a", None)
    with pytest.raises(UserError, match=r"adapter\.path: .* made for an embedding of 101 rows; the model has \d+"):
        run(f"adapter={{path: {tmp_path / 'a'}}}")


# Folders


def test_a_folder_with_its_base_opens_where_it_was_moved(run, tmp_path):
    overridden = "model.config={attention_dropout: 0.0}"  # a base as it was trained that is nowhere else
    folder, _ = run(f"adapter={SOFT['prefix-tuning']}", overridden, "train.max_steps=2")
    inputs = prompts(folder)
    expected = load_pretrained(str(folder))(**inputs).logits
    moved = tmp_path / "elsewhere"
    shutil.move(folder, moved)
    torch.testing.assert_close(load_pretrained(str(moved))(**inputs).logits, expected, rtol=0, atol=1e-5)


def test_a_base_whose_class_calls_its_modules_otherwise_is_kept(run, recipe, tiny_checkpoint, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 80, "initializer_range": 0.1}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": len(tokenizer)}
    GPT2LMHeadModel(GPT2Config(**sizes, **ids)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    other = f"model.path={tmp_path / 'gpt2'}"
    folder, metrics = run(other, "adapter={kind: lora, r: 4, merge: false}", "train.max_steps=2")
    assert (folder / "base" / "model.safetensors").is_file() and metrics["finished"]
    soft, _ = run(other, f"adapter={SOFT['prompt-tuning']}", "train.max_steps=2", name="soft")
    assert not (soft / "base").exists()  # a soft prompt names no module
    with pytest.raises(UserError, match=r"max_length is 80, but .* 80 tokens and the soft prompt takes 6"):
        run(other, f"adapter={SOFT['prompt-tuning']}", "train.max_length=80", name="long")


# What was trained


def watched(model, plan_names, kind="lora"):
    """A watch over a model, as the run uses it, and a stand-in for the trainer."""
    plan = SimpleNamespace(kind=kind, names=frozenset(plan_names), in_place=False)
    callbacks = []
    trainer = SimpleNamespace(
        model=model, state=SimpleNamespace(global_step=0), add_callback=lambda c: callbacks.append(c())
    )
    watch = Watch(model, plan)
    watch.begin(trainer)
    callbacks[0].on_train_begin(None, trainer.state, None, model=model)
    trainer.state.global_step = 3
    return watch, trainer


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
        PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        LoraConfig(target_modules=["k_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    ],
    ids=["ia3", "prompt", "lora"],
)
def test_a_tensor_that_no_gradient_reached_is_named(tiny, config):
    model = get_peft_model(tiny(), copy.deepcopy(config))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    watch, trainer = watched(model, named)
    must = [name for name in named if "lora_A" not in name]  # its first gradient is zero, so it may stay
    with pytest.raises(UserError, match=rf"{len(must)} adapter tensors are as they were before training: .*\. Why"):
        watch.check(trainer, "Why")
    for name in must:
        with torch.no_grad():
            named[name].view(-1)[0] += 1e-3
    watch.check(trainer, "Why")


def test_the_attached_set_is_the_plans(tiny):
    model = get_peft_model(tiny(), LoraConfig(target_modules=["k_proj"], task_type="CAUSAL_LM"))
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(UserError, match=r"not trained: x\.lora_A"):
        watched(model, names | {"x.lora_A"})
    with pytest.raises(UserError, match=r"trained too: .*layers\.0.*lora_B"):
        watched(model, {name for name in names if "layers.0.self_attn.k_proj.lora_B" not in name})


def test_the_plan_says_what_is_adapted_and_what_is_not(recipe, tiny):
    config = tiny(
        num_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=16, shared_expert_gate=True
    ).config
    plan = plan_adapter(config, recipe().adapter, SupervisedTuning)
    assert plan.adapted["mlp"] == {"down_proj": 2, "gate_proj": 2, "up_proj": 2}
    assert plan.frozen.keys() == {"embeddings", "router", "experts", "norms", "head"}  # the gate is routing
    (said,) = [text for name, text in plan.describe() if name == "adapter"]
    assert said.startswith("lora: attention (2 k_proj, 2 o_proj, 2 q_proj, 2 v_proj); mlp (2 down_proj")
    parts = recipe("adapter={kind: lora, r: 2, target_parts: [attention, experts]}").adapter
    plan = plan_adapter(config, parts, SupervisedTuning)
    assert plan.adapted["experts"] == {"experts.down_proj": 2, "experts.gate_up_proj": 2}
    assert "router" in plan.frozen and "mlp" in plan.frozen


def test_a_prefix_for_grouped_heads_of_their_own_size(run):
    """The width of a head is no share of the hidden size, and keys have fewer heads than queries."""
    shape = "{num_hidden_layers: 2, hidden_size: 24, intermediate_size: 32, num_attention_heads: 4, "
    shape += "num_key_value_heads: 2, head_dim: 10}"
    _, metrics = run(*SCRATCH[:2], SCRATCH[3], f"model.config={shape}", f"adapter={SOFT['prefix-tuning']}")
    assert metrics["adapter"]["trainable"] == 6 * 2 * 2 * 2 * 10  # tokens, layers, keys and values, heads, width
    assert metrics["finished"]
