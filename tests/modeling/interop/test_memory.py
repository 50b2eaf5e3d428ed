"""A conversion holds about one copy of the model: tensors are mapped from the shards and shared with the check."""

import subprocess
import sys

import pytest

CONVERT = """
import resource, sys
from pathlib import Path
import anyformer.modeling.interop
from transformers import LlamaForCausalLM
from anyformer.recipes.conversion import export_checkpoint, import_checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
convert = {"import": import_checkpoint, "export": export_checkpoint}[sys.argv[1]]
list(convert(sys.argv[2], Path(sys.argv[3]), verify=False))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_peak_memory_stays_near_one_copy(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path / "llama", max_shard_size="40MB")
    del model
    for verb, source, target in (("import", "llama", "ours"), ("export", "ours", "back")):
        command = [sys.executable, "-c", CONVERT, verb, str(tmp_path / source), str(tmp_path / target)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-2000:]
        peak = int(result.stdout.strip().splitlines()[-1])
        assert peak < 1.2 * size + 30e6, f"{verb}: {peak / 1e6:.0f} MB for a model of {size / 1e6:.0f} MB"
