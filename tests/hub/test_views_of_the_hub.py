"""`anyformer plan` and `anyformer show` of a Hub id: a foreign config is read, and no weight."""

import json
import subprocess
import sys

import pytest
from transformers import LlamaConfig

from .conftest import Hub

COMMAND = [sys.executable, "-P", "-c", "from anyformer.scripts.cli import main; main()"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
# With 1,000 tokens: embeddings and head; of a layer four products of attention, three of the rest, two norms.
PARAMETERS = 2 * 1000 * 64 + 3 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


@pytest.fixture
def published(hub: Hub):
    config = LlamaConfig(vocab_size=1000, num_key_value_heads=4, architectures=["LlamaForCausalLM"], **SIZES)
    hub.server.add_repo("alice/llama", private=False)
    hub.server.add_files("alice/llama", {"config.json": config.to_json_string().encode()})
    return hub


def run(hub: Hub, tmp_path, *words: str) -> str:
    done = subprocess.run([*COMMAND, *words], cwd=tmp_path, env=hub.env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert hub.server.files("alice/llama").keys() == {"config.json"}  # there is no weight to be read
    return done.stdout


def test_a_plan(published, tmp_path):
    found = json.loads(run(published, tmp_path, "plan", "alice/llama", "--gpu", "1MB", "--json"))
    assert found["parameters"]["total"] == PARAMETERS
    assert not found["fit"]["fits"] and found["fit"]["single"]


def test_a_diagram(published, tmp_path):
    assert f"{PARAMETERS:,}" in run(published, tmp_path, "show", "alice/llama")
