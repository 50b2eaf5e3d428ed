"""A sharded model becomes an ordinary folder, a file of weights at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import environment, free_port
from transformers import AutoModelForCausalLM

from anyformer import AnyformerConfig, AnyformerForCausalLM

WORKER = Path(__file__).with_name("whole_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("file_bytes", [20_000, 10**9])
def test_the_folder_opens_and_little_is_held_at_a_time(tmp_path, tied, file_bytes):
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
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command += [str(free_port()), str(WORKER), str(target), str(tmp_path / "source"), str(file_bytes)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    held = json.loads((target / "held.json").read_text())
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(held["files"]) == total  # what is tied is written once
    assert all(size <= max(file_bytes, held["largest"]) for size in held["files"])
    assert (len(held["files"]) == 1) == (file_bytes > total) == (not (target / "model.safetensors.index.json").exists())
    opened = AutoModelForCausalLM.from_pretrained(target).eval()
    assert type(opened) is AnyformerForCausalLM
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert opened(ids).logits.equal(model(ids).logits)
    # The same files of code and config as an ordinary save.
    expected = {p.name: p.read_bytes() for p in (tmp_path / "source").iterdir() if p.suffix != ".safetensors"}
    for name, content in expected.items():
        assert (target / name).read_bytes() == content, name
