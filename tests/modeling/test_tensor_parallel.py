"""The tensor-parallel plan on two processes: the same logits, loss and gradients as on one."""

import subprocess
import sys

import pytest
import torch

WORKER = """
import sys
import torch
import torch.distributed as dist
import anyformer
from transformers import AutoModelForCausalLM
from anyformer.recipes.parallel.world import leave

dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
output = model(tokens, labels=tokens)
output.loss.backward()
local = model.model.layers[0].self_attn.q_proj.weight
local = local.to_local() if hasattr(local, "to_local") else local
if dist.get_rank() == 0:
    torch.save({"logits": output.logits.detach(), "loss": output.loss.detach(), "rows": local.shape[0],
                "grad": model.model.norm.weight.grad}, sys.argv[2])
leave()
"""

LATENT = {"attention": "mla", "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
LATENT |= {"num_key_value_heads": None}


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch with gloo")
@pytest.mark.parametrize("fields", [{}, {"mlp": "dense", "norm": "layernorm"}, LATENT], ids=["gated", "dense", "mla"])
def test_two_processes_compute_what_one_does(tiny, tmp_path, fields):
    model = tiny(**fields)
    model.save_pretrained(tmp_path / "model")
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += [str(tmp_path / "model"), str(tmp_path / "result.pt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    parallel = torch.load(tmp_path / "result.pt")
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    single = model(tokens, labels=tokens)
    single.loss.backward()
    assert parallel["rows"] == model.model.layers[0].self_attn.q_proj.weight.shape[0] // 2
    torch.testing.assert_close(parallel["logits"], single.logits.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(parallel["loss"], single.loss.detach(), rtol=0, atol=1e-5)
    gradient = parallel["grad"]
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    torch.testing.assert_close(gradient, model.model.norm.weight.grad, rtol=0, atol=1e-5)
