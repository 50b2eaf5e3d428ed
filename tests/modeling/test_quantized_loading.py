"""Saved folders opened with weights in 8 and 4 bits: by bitsandbytes, and by torchao in a process that has it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from typer.testing import CliRunner

from anyformer import AnyformerConfig, AnyformerForCausalLM
from anyformer.scripts.cli import app

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the extra `quantization`")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "initializer_range": 0.1}
LATENT = {"attention": "mla", "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": None}
MODELS = {"grouped": {}, "latent": LATENT, "tied": {"tie_word_embeddings": True}}
KINDS = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}
# Of the logits' norm. A weight of 8 bits is off by a 254th of its row's largest at most, about 0.8 % of a usual one, as
# are the states that it multiplies; one of 4 bits by about 9 %. Over the 14 products of two layers that was measured to
# grow to 3 and to 27 to 43 %.
BOUNDS = {"int8": 0.06, "nf4": 0.5, "nf4, nested": 0.5, "fp4": 0.6}
# Beside the whole weights' rounding: that of states to 8 bits, of packed scales to bf16.
ROUNDED = 0.03
TOKENS = torch.arange(3, 27)[None]
every_kind = pytest.mark.parametrize("kind", KINDS)


def quantized(folder, kind):
    config = BitsAndBytesConfig(**KINDS[kind], bnb_4bit_compute_dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config).eval()


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits.float()


@pytest.fixture
def saved(tiny, tmp_path):
    """A function: save a tiny model in bf16 and give its folder and its logits."""

    def save(**fields):
        model = tiny(**(SIZES | fields)).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "whole")
        return tmp_path / "whole", logits(model)

    return save


def rounded(weight):
    """A quantised weight as it is multiplied."""
    if hasattr(weight, "SCB") and weight.SCB is not None:
        return weight.data * weight.SCB[:, None] / 127
    return bnb.functional.dequantize_4bit(weight.data, weight.quant_state)


def distance(one, other):
    return float((one - other).norm() / other.norm())


def with_rounded_weights(folder, model):
    """The plain model whose weights are those that a quantised one multiplies."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found = 0
    for name, module in model.model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            plain.model.get_submodule(name).weight.data.copy_(rounded(module.weight))
            found += 1
    assert found == sum(isinstance(m, torch.nn.Linear) for m in plain.model.modules())
    assert not isinstance(model.lm_head, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)
    return plain


@every_kind
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_the_rounded_weights_and_near_those_of_the_whole(saved, kind, fields):
    folder, expected = saved(**fields)
    model = quantized(folder, kind)
    plain = with_rounded_weights(folder, model)  # before a pass that packs them
    mine = logits(model)
    assert distance(mine, logits(plain)) < ROUNDED
    assert 1e-3 < distance(mine, expected) < BOUNDS[kind]


@every_kind
def test_the_first_token_is_that_of_a_whole_pass_and_the_rest_go_on(saved, kind):
    model = quantized(saved()[0], kind)
    tokens = model.generate(TOKENS, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert tokens.shape == (1, 30)
    assert tokens[0, 24] == logits(model)[0, -1].argmax()


@every_kind
def test_a_saved_folder_opens_again_without_being_told(saved, kind, tmp_path):
    model = quantized(saved()[0], kind)
    model.save_pretrained(tmp_path / "quantized")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized").eval()
    assert type(again) is AnyformerForCausalLM
    assert torch.equal(logits(again), logits(model))
    weights = [sum(f.stat().st_size for f in (tmp_path / n).glob("*.safetensors")) for n in ("whole", "quantized")]
    assert weights[1] < weights[0]


@pytest.mark.parametrize("kind", ["nf4", "nf4, nested"])
def test_weights_that_were_packed_are_not_written_wrong(saved, kind, tmp_path):
    """bitsandbytes packs 4-bit weights at the first pass, where the processor multiplies bf16, and cannot undo it."""
    model = quantized(saved()[0], kind)
    first = logits(model)
    packs = any(getattr(m, "support_avx512bf16_for_cpu", False) for m in model.modules())
    if packs:
        with pytest.raises(ValueError, match=r"packed for inference at its first pass.*save it before it computes"):
            model.save_pretrained(tmp_path / "packed")
        assert torch.equal(logits(model), first)
    else:
        model.save_pretrained(tmp_path / "packed")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
        assert torch.equal(logits(again), first)


def test_sizes_that_cannot_be_packed_work_unpacked(saved):
    folder, _ = saved(hidden_size=48, intermediate_size=80, head_dim=12)
    model = quantized(folder, "nf4")
    plain = with_rounded_weights(folder, model)
    assert distance(logits(model), logits(plain)) < ROUNDED


def folder_with_tokenizer(tiny_checkpoint, folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    torch.manual_seed(0)
    config = AnyformerConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SIZES,
    )
    AnyformerForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_generate_of_the_command_line_opens_such_a_folder(tiny_checkpoint, tmp_path):
    model = quantized(folder_with_tokenizer(tiny_checkpoint, tmp_path / "whole"), "int8")
    model.save_pretrained(tmp_path / "quantized")
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(tmp_path / "quantized")
    done = CliRunner().invoke(app, ["generate", str(tmp_path / "quantized"), "one two", "--max-new-tokens", "5"])
    assert done.exit_code == 0, done.output


TORCHAO = "torchao==0.18.0"


@pytest.fixture(scope="session")
def torchao_folder() -> Path:
    """Where torchao lies, fetched once through pip into the user's cache: installed, every process would import it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anyformer"
    target = cache / TORCHAO
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary", ":all:", "--retries", "1", "--timeout", "15", "--target", f"{folder}/held", TORCHAO]
        try:
            done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            pytest.skip("needs torchao: pip did not fetch it within 300 seconds")
        if done.returncode:
            pytest.skip(f"needs torchao: pip could not fetch it ({done.stderr.strip().splitlines()[-1:]})")
        (Path(folder) / "held").replace(target)
    return target


WITH_TORCHAO = """
import json, sys
import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig
import anyformer

tokens = torch.arange(3, 27)[None]

@torch.no_grad()
def logits(model):
    return model.eval()(tokens).logits.float()

for folder in sys.argv[1:]:
    whole = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    mine = logits(model)
    generated = model.generate(tokens, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    model.save_pretrained(folder + "-quantized")
    again = AutoModelForCausalLM.from_pretrained(folder + "-quantized")
    kinds = {type(m.weight).__name__ for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)}
    print(json.dumps({
        "error": float((mine - whole).norm() / whole.norm()),
        "kinds": sorted(kinds),
        "again": torch.equal(logits(again), mine),
        "first": bool(generated[0, 24] == mine[0, -1].argmax()),
    }))
"""


def test_torchao_in_8_bits(tiny, torchao_folder, tmp_path):
    for name, fields in MODELS.items():
        tiny(**(SIZES | fields)).to(torch.bfloat16).save_pretrained(tmp_path / name)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(torchao_folder))))
    command = [sys.executable, "-c", WITH_TORCHAO, *(str(tmp_path / name) for name in MODELS)]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(MODELS)
    for each in found:
        assert 1e-3 < each["error"] < BOUNDS["int8"]
        assert (each["kinds"], each["again"], each["first"]) == (["Int8Tensor"], True, True)


def test_neither_package_is_needed(saved, tmp_path):
    """Where they are absent: a whole folder opens, computes, saves and generates."""
    folder, expected = saved()
    torch.save(expected, tmp_path / "expected.pt")
    code = f"""
import importlib.util
here = importlib.util.find_spec
absent = ("bitsandbytes", "torchao")
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in absent else here(name, *more)
import torch, anyformer
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype=torch.bfloat16).eval()
with torch.no_grad():
    logits = model(torch.arange(3, 27)[None]).logits.float()
assert torch.equal(logits, torch.load({str(tmp_path / "expected.pt")!r}))
model.generate(torch.arange(3, 27)[None], max_new_tokens=3)
model.save_pretrained({str(tmp_path / "again")!r})
import sys
assert not set(absent) & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
