"""Folders that open anywhere: with the project, without it, moved, damaged."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from anyformer import AnyformerForCausalLM, AnyformerModel
from anyformer.modeling import AUTO_MAP
from anyformer.modeling.configuration_anyformer import DECISION_MAP

TOKENS = [[5, 6, 7, 8, 9]]

# A process in which the project is not installed, and that cannot reach any hub.
ELSEWHERE = """
import sys, json

class Absent:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "anyformer":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

source, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
assert not any(name.startswith("anyformer.") for name in sys.modules)
tokens = torch.tensor([[5, 6, 7, 8, 9]])
torch.save(model(tokens).logits.detach(), target + ".pt")
torch.save(model.generate(tokens, max_new_tokens=5, do_sample=False), target + ".tokens.pt")
body = AutoModel.from_pretrained(source, trust_remote_code=True)
assert torch.equal(body.embed_tokens.weight, model.model.embed_tokens.weight)
assert AutoConfig.from_pretrained(source, trust_remote_code=True).model_type == "anyformer"
model.save_pretrained(target)
"""


def run_elsewhere(source, target, cache, cwd=None):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cache), "PYTHONPATH": ""}
    command = [sys.executable, "-c", ELSEWHERE, str(source), str(target)]
    result = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("tied", [False, True])
def test_folder_opens_without_the_project_moves_and_saves_again(tiny, tmp_path, tied):
    model = tiny(tie_word_embeddings=tied)
    tokens = torch.tensor(TOKENS)
    logits, greedy = model(tokens).logits, model.generate(tokens, max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path / "first")
    shutil.move(tmp_path / "first", tmp_path / "moved")
    run_elsewhere(".", tmp_path / "second", tmp_path / "cache", cwd=tmp_path / "moved")
    assert torch.equal(torch.load(tmp_path / "second.pt"), logits)
    assert torch.equal(torch.load(tmp_path / "second.tokens.pt"), greedy)
    # The second save holds the modeling files again, opens without the project, and with it.
    run_elsewhere(tmp_path / "second", tmp_path / "third", tmp_path / "cache")
    assert torch.equal(torch.load(tmp_path / "third.pt"), logits)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "third")
    assert type(again) is AnyformerForCausalLM
    assert torch.equal(again(tokens).logits, logits)


def test_saved_folder_lists_every_head_whatever_was_saved(tiny, tmp_path):
    tiny().model.save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map == AUTO_MAP | DECISION_MAP
    for reference in auto_map.values():
        assert (tmp_path / (reference.split(".")[0] + ".py")).is_file()


@pytest.mark.parametrize(
    "imports",
    [
        "from transformers import AutoModelForCausalLM",
        "from transformers import AutoConfig; from transformers import AutoModelForCausalLM",
        "from transformers import Trainer, AutoModelForCausalLM",
        "import transformers.modeling_utils; from transformers import AutoModelForCausalLM",
        "from transformers import pipeline, AutoModelForCausalLM",
        "from anyformer import AnyformerConfig; from transformers import AutoModelForCausalLM",
    ],
)
def test_import_registers_the_auto_classes_and_loads_no_torch(tiny, tmp_path, imports):
    tiny().save_pretrained(tmp_path)
    code = (
        "import sys, anyformer; assert 'torch' not in sys.modules and 'transformers' not in sys.modules;"
        f"{imports}; print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__module__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "anyformer.modeling.generation_heads", result.stderr[-2000:]


def test_importing_after_the_auto_classes_registers_at_once(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    code = (
        "from transformers import AutoConfig; import anyformer; "
        f"print(AutoConfig.from_pretrained({str(tmp_path)!r}).num_hidden_layers)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "2", result.stderr[-2000:]
    assert isinstance(AutoModel.from_pretrained(tmp_path), AnyformerModel)


def test_shards_and_dtype(tiny, tmp_path):
    model = tiny(tie_word_embeddings=True).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert again.dtype == torch.bfloat16
    assert again.lm_head.weight is again.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_untied_but_head_absent_names_key_and_flag(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lm_head\.weight.*tie_word_embeddings is False.*set it to true"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_any_absent_weight_is_an_error(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        AnyformerForCausalLM.from_pretrained(tmp_path)


def test_tied_but_another_head_present_keeps_it_and_says_untied(tiny, tmp_path):
    model = tiny(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    head = torch.randn(101, 32)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": head}))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, head)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert again.config.tie_word_embeddings is False
    again.save_pretrained(tmp_path / "saved")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").lm_head.weight, head)


def test_weights_survive_any_default_dtype(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_modeling_files_import_nothing_of_the_project_but_themselves():
    import ast
    from pathlib import Path

    import anyformer.modeling

    for path in Path(anyformer.modeling.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] != "anyformer", path
            if isinstance(node, ast.ImportFrom) and node.level:
                # What saving finds and copies: `from .x import y`, one level, no packages.
                assert node.level == 1 and node.module and "." not in node.module, f"{path}:{node.lineno}"
