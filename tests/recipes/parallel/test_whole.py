"""A sharded model becomes an ordinary folder, a tensor at a time."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from anyformer import AnyformerConfig, AnyformerForCausalLM
from anyformer.recipes.parallel.whole import _write_tensors

WORKER = Path(__file__).with_name("whole_worker.py")

NAMES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8")
NAMES += ("uint8", "bool")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("file_bytes", [20_000, 10**9])
def test_the_folder_opens_and_is_as_an_ordinary_one(zygote, tmp_path, tied, file_bytes):
    torch.manual_seed(0)
    config = AnyformerConfig(
        vocab_size=97,  # two processes have parts of different sizes
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        num_experts=3,
        moe_intermediate_size=16,
        tie_word_embeddings=tied,
    )
    model = AnyformerForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "source")
    target = tmp_path / "target"
    target.mkdir()
    done = zygote.run([str(target), str(tmp_path / "source"), str(file_bytes)], script=str(WORKER), processes=2)
    assert done == [0, 0], zygote.log.read_text()[-3000:]
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    files = sorted(target.glob("model*.safetensors"))
    held = [sum(t.numel() * t.element_size() for t in load_file(file).values()) for file in files]
    assert sum(held) == sum(sizes)  # what is tied is written once
    assert all(size <= max(file_bytes, max(sizes)) for size in held)
    alone = file_bytes > sum(sizes)
    assert (len(files) == 1) == alone == (not (target / "model.safetensors.index.json").exists())
    # To the last byte what the library writes.
    for file in files:
        save_file(load_file(file), tmp_path / "expected", metadata={"format": "pt"})
        assert file.read_bytes() == (tmp_path / "expected").read_bytes()
    if alone:
        assert files[0].read_bytes() == (tmp_path / "source" / files[0].name).read_bytes()
    opened = AutoModelForCausalLM.from_pretrained(target).eval()
    assert type(opened) is AnyformerForCausalLM
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert opened(ids).logits.equal(model(ids).logits)
    # The same files of code and config as an ordinary save.
    expected = {p.name: p.read_bytes() for p in (tmp_path / "source").iterdir() if p.suffix != ".safetensors"}
    for name, content in expected.items():
        assert (target / name).read_bytes() == content, name


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_written_as_the_library_does(tmp_path, name):
    dtype = getattr(torch, name)
    tensors = {
        "b.é": torch.arange(6).reshape(2, 3).to(dtype),
        "a": torch.ones((), dtype=dtype),
        "double": torch.arange(3, dtype=torch.float64),
        "none": torch.empty((0, 4), dtype=dtype),
        "turned": torch.arange(6).reshape(2, 3).to(dtype).T,
    }
    _write_tensors(tmp_path / "written", list(tensors), tensors)
    back = load_file(tmp_path / "written")
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert back[key].dtype == tensor.dtype and back[key].shape == tensor.shape
        assert back[key].double().equal(tensor.double())
