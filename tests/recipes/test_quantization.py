"""Bases in 4 and 8 bits: what is quantised, that adapters train on it for real, and what becomes of the result."""

import copy
import inspect
import json
from types import SimpleNamespace

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from recipe_files import GOOD, fault
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from tuning import assert_equal_weights

import anyformer
from anyformer.recipes import quantization as module
from anyformer.recipes.adapters import put_on
from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.models import load_pretrained
from anyformer.recipes.quantization import quantize, quantized_bytes, require_available, weights_plan
from anyformer.recipes.run import run_recipe
from anyformer.recipes.schema import Quantization

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
EIGHT = {"load_in_8bit": True}
KINDS = {"nf4": NF4, "fp4": {"load_in_4bit": True}, "int8": EIGHT}
FOUR_BITS = "model.quantization={load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true}"
EIGHT_BITS = "model.quantization={load_in_8bit: true}"
LATENT = {"attention": "mla", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "hidden_size": 64}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64}
SPARSE |= {"shared_expert_gate": True, "hidden_size": 64, "moe_intermediate_size": 64}
every_kind = pytest.mark.parametrize("given", KINDS.values(), ids=KINDS)


def storage(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def held(weight: torch.Tensor) -> int:
    """Bytes that a quantised weight really keeps, its scales and tables included."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return storage(weight) + storage(weight.SCB)
    kept = [weight, state.absmax, state.code]
    if state.nested:
        kept += [state.state2.absmax, state.state2.code, state.offset]
    return sum(map(storage, kept))


def is_quantized(layer: torch.nn.Module) -> bool:
    return isinstance(layer, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)


@pytest.fixture
def run(tmp_path, tiny_checkpoint):
    """A function: run a recipe on 48 counting rows and return its folder and metrics."""
    lines = [
        json.dumps({"prompt": f"count {i} from {WORDS[i % 7]}", "completion": " ".join(WORDS[i % 7 : i % 7 + 3])})
        for i in range(48)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    text = f"""
model: {{path: {tiny_checkpoint}, verify_import: false}}
adapter: {{kind: lora, r: 4}}
data: {{source: {tmp_path / "rows.jsonl"}, eval_fraction: 0.2}}
train:
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

    def execute(*overrides, name="run", **options):
        folder = run_recipe(load_recipe(path, [*overrides, f"train.output_dir={tmp_path / name}"]), **options)
        return folder, json.loads((folder / "metrics.json").read_text(encoding="utf-8"))

    return execute


# The weights


def test_the_keys_are_the_librarys():
    known = set(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs"}
    assert set(Quantization.model_fields) == known
    theirs = BitsAndBytesConfig()
    for name in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_threshold", "load_in_4bit"):
        assert getattr(Quantization(), name) == getattr(theirs, name)


@every_kind
def test_the_bytes_of_a_matrix_are_those_it_keeps(given):
    quantization = Quantization(**given)
    for outputs, inputs in ((768, 512), (96, 40), (1, 64)):
        weight = module._linear(quantization, inputs, outputs).to("cpu").weight
        assert quantized_bytes(quantization, outputs, inputs) == held(weight)


@every_kind
@pytest.mark.parametrize("fields", [LATENT, SPARSE, {"tie_word_embeddings": True}], ids=["latent", "sparse", "tied"])
def test_the_planned_memory_is_what_the_model_keeps(tiny, given, fields):
    quantization = Quantization(**given)
    model = tiny(**fields)
    planned = weights_plan(model.config, "causal_lm", SimpleNamespace(quantization=quantization, dtype="float32"))
    quantized = quantize(model, quantization)
    layers = {n: m for n, m in quantized.named_modules() if is_quantized(m)}
    plain = sum(storage(p) for n, p in quantized.named_parameters() if n.removesuffix(".weight") not in layers)
    assert planned.bytes == plain + sum(held(layer.weight) for layer in layers.values())
    assert sum(planned.quantized.values()) == sum(layer.in_features * layer.out_features for layer in layers.values())
    assert planned.bits == quantization.bits


def test_the_head_and_all_that_routes_stay_as_they_are(tiny):
    model = tiny(**SPARSE)
    quantized = quantize(model, Quantization(**NF4, llm_int8_skip_modules=["o_proj"]))
    names = {name.rpartition(".")[2] for name, m in quantized.named_modules() if is_quantized(m)}
    assert names == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    before, after = model.state_dict(), quantized.state_dict()
    for name in ("lm_head.weight", "model.layers.0.mlp.router.weight", "model.layers.1.mlp.shared_expert_gate.weight"):
        assert after[name].equal(before[name])
    assert after["model.layers.0.mlp.experts.gate_up_proj"].equal(before["model.layers.0.mlp.experts.gate_up_proj"])
    plan = weights_plan(model.config, "causal_lm", SimpleNamespace(quantization=Quantization(**NF4), dtype="float32"))
    assert plan.kept.keys() == {"embeddings", "router", "experts", "norms", "head"}
    ((name, said),) = plan.describe()
    assert name == "quantised" and said.startswith("in 4 bits: attention") and "experts 98.3 k" in said
    with pytest.raises(UserError, match=r"llm_int8_skip_modules names 'o_porj'; .*o_proj"):
        quantize(model, Quantization(**NF4, llm_int8_skip_modules=["o_porj"]))


@pytest.mark.parametrize("fields", [{}, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize("given", [NF4, {"load_in_4bit": True}], ids=["nf4", "fp4"])
def test_it_computes_with_the_rounded_weights(tiny, given, fields):
    """As the same model does with each weight dequantised by the library, also after passes without gradients, which
    on some processors pack the weights anew; cached generation is the plain forward's, latent attention included."""
    model = tiny(hidden_size=64, **{k: v for k, v in fields.items() if k != "hidden_size"})
    quantized, plain = quantize(model, Quantization(**given)).eval(), copy.deepcopy(model)
    for name, layer in quantized.named_modules():
        if is_quantized(layer):
            whole = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            plain.get_submodule(name).weight.data.copy_(whole)
    tokens = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(quantized(tokens).logits, plain(tokens).logits, rtol=0, atol=2e-5)
    assert not torch.allclose(plain(tokens).logits, model(tokens).logits, atol=0.05)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert quantized.generate(tokens, **options).equal(plain.generate(tokens, **options))
    adapted = get_peft_model(quantized, LoraConfig(target_modules="all-linear", r=2, task_type="CAUSAL_LM"))
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.any() for n, p in adapted.named_parameters() if "lora_B" in n)


# Runs


@pytest.mark.parametrize(
    "overrides",
    [
        (FOUR_BITS,),
        (EIGHT_BITS, "train.gradient_checkpointing=true"),
        (FOUR_BITS, "adapter={kind: lora, r: 4, use_dora: true}", "train.eval_strategy=steps", "train.eval_steps=4"),
        (FOUR_BITS, "adapter={kind: lora, r: 4, modules_to_save: [lm_head]}", "train.gradient_checkpointing=true"),
        (FOUR_BITS, "adapter={kind: ia3}", "train.learning_rate=0.2"),
        (EIGHT_BITS, "adapter={kind: ia3}", "train.learning_rate=0.2"),
    ],
    ids=["lora", "lora-8", "dora", "head", "ia3", "ia3-8"],
)
def test_an_adapter_trains_on_a_quantised_base_and_merges_into_the_whole_one(run, tiny_checkpoint, overrides):
    folder, metrics = run(*overrides)
    assert metrics["quantized_after"]["loss"] < metrics["quantized_before"]["loss"] - 0.1
    assert metrics["after"]["loss"] < metrics["before"]["loss"] - 0.1
    assert metrics["quantized_before"]["loss"] != metrics["before"]["loss"]
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert not getattr(merged, "is_quantized", False) and not hasattr(merged.config, "quantization_config")
    adapted = put_on(anyformer.from_hf(tiny_checkpoint), folder / "adapter")
    tokens = torch.arange(3, 27).view(2, 12)
    torch.testing.assert_close(merged(tokens).logits, adapted(input_ids=tokens).logits, rtol=0, atol=1e-5)
    trained = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert any(not t.equal(t.bfloat16().float()) for n, t in trained.items())  # not rounded to 16 bits
    assert all(tensor.dtype == torch.float32 for tensor in trained.values())
    card = (folder / "README.md").read_text(encoding="utf-8")
    shown = f"{metrics['quantized_before']['loss']:.4f} -> {metrics['quantized_after']['loss']:.4f}"
    assert "bits" in card and shown in card


@pytest.mark.parametrize(
    "adapter", ["{kind: prompt-tuning}", "{kind: prefix-tuning}", "{kind: lora, r: 4, merge: false}"]
)
def test_an_adapter_that_is_kept_is_measured_on_the_base_that_it_names(run, tiny_checkpoint, adapter):
    rate = "2e-2" if "lora" in adapter else "0.3"
    folder, metrics = run(FOUR_BITS, f"adapter={adapter}", f"train.learning_rate={rate}")
    assert metrics["quantized_after"]["loss"] < metrics["quantized_before"]["loss"]
    assert metrics["after"]["loss"] < metrics["before"]["loss"] and metrics["finished"]
    held_config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert held_config["base_model_name_or_path"] == str(tiny_checkpoint)
    model = load_pretrained(str(folder))
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert not getattr(base, "is_quantized", False)


def test_training_goes_on_and_resumes_on_a_quantised_base(run, interrupted):
    saving = ("train.save_strategy=steps", "train.save_steps=5", "eval.samples=0")
    whole, metrics = run(FOUR_BITS, *saving, name="whole")

    with interrupted():
        run(FOUR_BITS, *saving, name="halted")
    halted, _ = run(FOUR_BITS, *saving, name="halted", resume=True)
    assert_equal_weights(whole, halted)
    _, went_on = run(FOUR_BITS, f"adapter={{path: {whole / 'adapter'}}}", name="on")
    assert went_on["before"]["loss"] == pytest.approx(metrics["after"]["loss"], abs=1e-6)
    assert went_on["quantized_before"]["loss"] == pytest.approx(metrics["quantized_after"]["loss"], abs=1e-6)
    assert went_on["quantized_after"]["loss"] < went_on["quantized_before"]["loss"]


def test_experts_are_adapted_whole_beside_quantised_attention(run, tiny_checkpoint):
    shape = "{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 64, num_attention_heads: 4, "
    shape += "num_key_value_heads: 2, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32}"
    model = ("~model.path", "model.preset=smollm2-135m", f"model.tokenizer={tiny_checkpoint}", f"model.config={shape}")
    folder, metrics = run(*model, FOUR_BITS, "adapter={kind: lora, r: 2, target_parts: [attention, experts]}")
    assert metrics["adapter"]["adapted"]["experts"] == {"experts.down_proj": 2, "experts.gate_up_proj": 2}
    assert "router" in metrics["adapter"]["frozen"]
    assert metrics["quantized_after"]["loss"] < metrics["quantized_before"]["loss"]
    names = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert any("experts" in name for name in names) and not any("router" in name for name in names)


# Refused


def test_without_bitsandbytes_nothing_is_loaded(run, monkeypatch):
    real = module.importlib.util.find_spec
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda n: None if n == "bitsandbytes" else real(n))
    monkeypatch.setattr("anyformer.recipes.models.load_model", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"model\.quantization: .*not installed: pip install bitsandbytes"):
        run(FOUR_BITS)


@pytest.mark.parametrize("fault", [RuntimeError("no kernel"), NotImplementedError("not on this device")])
def test_a_machine_that_cannot_is_found_before_weights_are_loaded(monkeypatch, fault):
    def broken(*args, **kwargs):
        raise fault

    monkeypatch.setattr(bnb.nn.Linear4bit, "forward", broken)
    with pytest.raises(UserError, match=f"cannot train in 4 bits on this machine: {fault}. Leave model.quantization"):
        require_available(Quantization(**NF4))


def test_weights_that_pass_no_gradient_are_refused(monkeypatch):
    monkeypatch.setattr(bnb.nn.Linear4bit, "forward", lambda self, x: x.detach().requires_grad_())
    with pytest.raises(UserError, match="no gradient passes through 4-bit weights"):
        require_available(Quantization(**NF4))


REFUSED = [
    ("{}", "lora", "model.quantization: needs exactly one of load_in_4bit: true and load_in_8bit: true"),
    ("{load_in_4bit: true, load_in_8bit: true}", "lora", "model.quantization: needs exactly one"),
    ("{load_in_8bit: true, bnb_4bit_quant_type: nf4}", "lora", "bnb_4bit_quant_type: has no effect with load_in_8bit"),
    ("{load_in_4bit: true, llm_int8_threshold: 5}", "lora", "llm_int8_threshold: has no effect with load_in_4bit"),
    ("{load_in_4bit: true, bnb_4bit_quant_type: nf5}", "lora", "must be nf4 or fp4, found 'nf5'; did you mean 'nf4'?"),
    ("{load_in_4bit: yes}", "lora", "load_in_4bit: must be true or false, found 'yes'; write true"),
    ("{load_in_4bits: true}", "lora", "unknown key; did you mean 'load_in_4bit'?"),
    ("{load_in_8bit: true, llm_int8_has_fp16_weight: true}", "lora", "keeps a second copy of the weights"),
    (
        "{load_in_4bit: true}",
        "none",
        "quantised weights cannot be trained, and adapter.kind is none: choose an adapter",
    ),
    (
        "{load_in_4bit: true}",
        "freeze, train: [norms]",
        "quantised weights cannot be trained, and adapter.kind is freeze",
    ),
    ("{load_in_4bit: true}", "lora, init_lora_weights: pissa_niter_4", "pissa_niter_4 starts from the base's own"),
    ("{load_in_8bit: true}", "lora, use_dora: true", "adapter.use_dora: DoRA takes the norms of the base's matrices"),
    ("{load_in_4bit: true}", "lora, init_lora_weights: olora", "olora starts from the base's own weights"),
]


@pytest.mark.parametrize(("section", "adapter", "message"), REFUSED, ids=[f"{c[0]} {c[1]}" for c in REFUSED])
def test_what_makes_no_sense_is_refused_when_read(section, adapter, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = GOOD.replace("path: some/model", f"path: some/model\n  quantization: {section}")
    found = fault(f"{text}adapter: {{kind: {adapter}}}\n")
    assert message in found and found.startswith("r.yaml:")


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("{load_in_8bit: true}", {"use_dora": True}, "adapter.path: DoRA takes the norms"),
        ("{load_in_4bit: true}", {"init_lora_weights": "pissa"}, "started from its base's own weights"),
    ],
)
def test_a_saved_adapter_that_needs_whole_weights_is_refused(section, fields, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    LoraConfig(task_type="CAUSAL_LM", **fields).save_pretrained(tmp_path / "a")
    text = GOOD.replace("path: some/model", f"path: some/model\n  quantization: {section}")
    assert message in fault(f"{text}adapter: {{path: {tmp_path / 'a'}}}\n")
