"""A saved adapter that is damaged, incomplete or of another base is refused or told, never taken in silence."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from anyformer.recipes.adapters.bases import other_base
from anyformer.recipes.errors import UserError
from anyformer.recipes.run import run_recipe
from anyformer.scripts.cli import app

PREFIX = "base_model.model.model.layers"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def adapter(tiny_checkpoint, tmp_path) -> Path:
    """PEFT's own, on the stock class, with a change that is not zero."""
    base = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def changed(adapter: Path, change) -> None:
    tensors = load_file(adapter / WEIGHTS)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS)


def halve(tensors: dict) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def add_a_layer(tensors: dict) -> None:
    tensors[f"{PREFIX}.7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 32)


def spoil(tensors: dict) -> None:
    tensors[f"{PREFIX}.0.self_attn.v_proj.lora_B.weight"][0, 0] = float("nan")


def widen(tensors: dict) -> None:
    for name, tensor in tensors.items():
        tensors[name] = torch.cat([tensor, tensor], dim=0 if "lora_A" in name else 1)


DAMAGE = [
    (halve, r"lacks model\.layers\.1\.self_attn\.q_proj\.lora_A\.weight, .* and 1 more"),
    (add_a_layer, r"holds model\.layers\.7\.self_attn\.q_proj\.lora_A\.weight, for which the AnyformerForCausalLM"),
    (spoil, r"not finite \(nan or inf\) in model\.layers\.0\.self_attn\.v_proj\.lora_B\.weight"),
    (widen, r"model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight is \(8, 32\) and not \(4, 32\)"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_a_damaged_adapter_is_refused(recipe, adapter, tiny_checkpoint, tmp_path, damage, message, monkeypatch):
    done = CliRunner().invoke(app, ["merge", str(adapter), str(tmp_path / "whole"), "--base", str(tiny_checkpoint)])
    assert done.exit_code == 0, done.output
    changed(adapter, damage)
    monkeypatch.setattr("anyformer.recipes.models.load_model", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(UserError, match=message) as caught:
        run_recipe(recipe(f"adapter={{path: {adapter}}}"))
    assert str(caught.value).startswith("adapter.path: ") and "\n" not in str(caught.value)
    monkeypatch.undo()
    done = CliRunner().invoke(app, ["merge", str(adapter), str(tmp_path / "merged"), "--base", str(tiny_checkpoint)])
    assert done.exit_code == 2 and not (tmp_path / "merged").exists()
    assert message.split(",")[0].replace("\\", "")[:60] in " ".join(done.output.split())


def named_base(adapter: Path, base: str | Path) -> None:
    file = adapter / "adapter_config.json"
    fields = json.loads(file.read_text(encoding="utf-8")) | {"base_model_name_or_path": str(base)}
    file.write_text(json.dumps(fields), encoding="utf-8")


def said_of_base(recipe, adapter: Path, *overrides: str) -> str | None:
    return other_base(recipe(f"adapter={{path: {adapter}}}", *overrides))


def test_another_base_is_told(recipe, adapter, tiny_checkpoint, tmp_path, capsys):
    assert said_of_base(recipe, adapter) is None
    shutil.copytree(tiny_checkpoint, tmp_path / "merged")
    (tmp_path / "link").symlink_to(tiny_checkpoint)
    assert said_of_base(recipe, adapter, f"model.path={tmp_path / 'link'}") is None
    short = ("train.max_steps=1", "train.warmup_steps=0", "eval.samples=0", "~data.eval_fraction")
    run_recipe(recipe(f"adapter={{path: {adapter}}}", f"model.path={tmp_path / 'merged'}", *short))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("Warning: the adapter in") == 1
    assert f"was trained on {tiny_checkpoint}, and model.path is {tmp_path / 'merged'}" in said
    assert "added twice" in said


@pytest.mark.parametrize(
    ("named", "path", "told"),
    [
        ("/was/here/before", None, False),
        ("/was/here/before", "org/model", False),
        ("org/model", None, False),  # downloaded to a folder, for all one can see
        ("org/model", "org/model", False),
        ("org/model", "org/other", True),
    ],
)
def test_a_base_that_was_moved_is_no_mistake(recipe, adapter, named, path, told):
    named_base(adapter, named)
    said = said_of_base(recipe, adapter, *([f"model.path={path}"] if path else []))
    assert (said is not None) == told
    if told:
        assert f"was trained on {named}, and model.path is {path}" in said


def test_another_vocabulary_is_refused(recipe, adapter, tiny_checkpoint, tmp_path):
    larger = tmp_path / "larger"
    shutil.copytree(tiny_checkpoint, larger)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows + 40)
    model.save_pretrained(larger)
    message = rf"adapter\.path: .* embedding has {rows} rows, and the model's has {rows + 40}"
    with pytest.raises(UserError, match=message):
        run_recipe(recipe(f"adapter={{path: {adapter}}}", f"model.path={larger}"), dry_run=True)
