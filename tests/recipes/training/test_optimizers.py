"""Optimisers by name, Muon beside AdamW, weight decay, clipping and precision."""

import copy
from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer

from anyformer.modeling import NORMS
from anyformer.recipes import arguments as arguments_module
from anyformer.recipes.arguments import training_arguments
from anyformer.recipes.errors import UserError
from anyformer.recipes.objectives.trainers import library_trainer
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.padding import pad_rows
from anyformer.recipes.training import extended
from anyformer.recipes.training.optimizers import MuonAdamW, muon_parameters, muon_settings

ARGUMENTS = ("transformers.training_args", "TrainingArguments")


def rows():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 101, (8, 9), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_of(model, folder, **train):
    values = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "save_strategy": "no", "logging_steps": 1}
    values |= {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    return library_trainer(
        Trainer,
        model,
        training_arguments(ARGUMENTS, values | train),
        adapter=None,
        train_dataset=Dataset.from_list(rows()),
        data_collator=partial(pad_rows, pad_token_id=0),
    )


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def inner(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


# By name

NAMES = {
    "adamw_torch": torch.optim.AdamW,
    "adamw_torch_fused": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "muon": MuonAdamW,
}


@pytest.mark.parametrize("name", [*NAMES, "adafactor", "stable_adamw"])
def test_each_trains_on_a_processor(tiny, tmp_path, name):
    if name == "stable_adamw":
        pytest.importorskip("optimi", reason="pip install torch-optimi")
    model = tiny()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = trainer_of(model, tmp_path, optim=name, max_steps=8, learning_rate=1e-3 if name != "sgd" else 1e-2)
    trainer.train()
    assert isinstance(inner(trainer), NAMES.get(name, object))
    losses = [entry["loss"] for entry in logs_of(trainer)]
    assert sum(losses[-2:]) < sum(losses[:2])
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())


def test_the_default_is_fused_where_torch_has_it_and_else_takes_foreach(tiny, tmp_path, monkeypatch):
    trainer = trainer_of(tiny(), tmp_path)
    trainer.train()
    assert inner(trainer).defaults["fused"] is True
    monkeypatch.setattr("anyformer.recipes.training.optimizers.fused_adamw_runs", lambda device: False)
    plain = trainer_of(tiny(), tmp_path)
    plain.train()
    # None: torch itself takes foreach on the devices where it is faster.
    assert inner(plain).defaults["fused"] is None and inner(plain).defaults["foreach"] is None
    assert plain.args.optim == "adamw_torch"
    assert logs_of(plain)[-1]["loss"] == pytest.approx(logs_of(trainer)[-1]["loss"], abs=1e-5)
    assert arguments_module.training_arguments(ARGUMENTS, {"output_dir": "x"}).run_name == "x"


# Muon


def test_muon_takes_the_matrices_inside_and_adamw_the_rest(tiny):
    fields = {"attention_bias": True, "mlp_bias": True, "qk_norm": "head", "position_embedding": "learned"}
    model = tiny(norm="layernorm", num_experts=4, first_k_dense_replace=1, **fields)
    found = {id(p) for p in muon_parameters(model)}
    names = {name for name, p in model.named_parameters() if id(p) in found}
    layers = {f"model.layers.{n}.self_attn.{part}_proj.weight" for n in (0, 1) for part in "qkvo"}
    layers |= {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert names == layers | {"model.layers.1.mlp.router.weight"}  # experts are stacks of matrices


def test_a_tied_head_and_norms_of_each_head_are_not_muons(tiny):
    tied = tiny(tie_word_embeddings=True)
    assert all("proj" in n for n, p in tied.named_parameters() if id(p) in {id(q) for q in muon_parameters(tied)})
    shared = tiny(head="seq2seq_lm", architecture="encoder-decoder", decoder_start_token_id=1)
    chosen = {id(q) for q in muon_parameters(shared)}
    assert {n.split(".")[-2] for n, p in shared.named_parameters() if id(p) in chosen} == {
        *(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down"))
    }


def test_of_an_adapter_muon_takes_its_matrices(tiny):
    model = get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    chosen = {id(p) for p in muon_parameters(model)}
    trained = {n: id(p) in chosen for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n, yes in trained.items() if yes} == {n for n in trained if "lora_" in n} and len(trained) == 5


def test_steps_are_those_of_torchs_two_optimisers(tiny, tmp_path):
    """Three steps of the trainer against torch.optim.Muon and torch.optim.AdamW by themselves on the same gradients."""
    model = tiny()
    twin = copy.deepcopy(model)
    options = {"optim_args": "momentum=0.9, ns_steps=4", "weight_decay": 0.1, "max_grad_norm": 0.0}
    trainer = trainer_of(model, tmp_path, optim="muon", lr_scheduler_type="constant", **options)
    batches = []
    model.register_forward_pre_hook(lambda module, args, kwargs: batches.append(kwargs), with_kwargs=True)
    trainer.train()
    matrices = {id(p) for p in muon_parameters(twin)}
    decayed = {n for n, p in twin.named_parameters() if p.dim() > 1}
    named = list(twin.named_parameters())
    muon = torch.optim.Muon(
        [p for _, p in named if id(p) in matrices],
        lr=1e-2,
        weight_decay=0.1,
        momentum=0.9,
        ns_steps=4,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [
        {"params": [p for n, p in named if id(p) not in matrices and (n in decayed) is decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(rest, lr=1e-2)
    for batch in batches:
        twin.train()(**batch).loss.backward()
        muon.step(), adamw.step()
        muon.zero_grad(), adamw.zero_grad()
    for (name, expected), found in zip(twin.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=name)


def test_the_first_step_of_a_matrix_is_orthogonal(tiny, tmp_path):
    """Its singular values lie in the band that the iteration aims at, 0.2 sqrt(largest side) times the rate; those that
    are next to nothing in the gradient are not there after five rounds."""
    model = tiny(num_hidden_layers=1)
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    trainer_of(model, tmp_path, optim="muon", max_steps=1, warmup_steps=0, weight_decay=0.0).train()
    singular = torch.linalg.svdvals((before - weight.detach()) / (1e-2 * 0.2 * max(weight.shape) ** 0.5))
    assert singular.quantile(0.15) > 0.5 and singular.max() < 1.5


def test_both_learning_rates_follow_the_schedule_and_the_log_shows_adamws(tiny, tmp_path):
    trainer = trainer_of(tiny(), tmp_path, optim="muon", optim_args="lr=0.05", max_steps=4)
    rates = []
    trainer.create_optimizer()
    inner(trainer).register_step_pre_hook(
        lambda optimizer, *args: rates.append({g["use_muon"]: g["lr"] for g in optimizer.param_groups})
    )
    trainer.train()
    shares = [1.0, 0.75, 0.5, 0.25]
    assert [rate[False] for rate in rates] == pytest.approx([1e-2 * share for share in shares])
    assert [rate[True] for rate in rates] == pytest.approx([0.05 * share for share in shares])
    assert [entry["learning_rate"] for entry in logs_of(trainer)] == pytest.approx([1e-2 * share for share in shares])


def test_a_resumed_run_of_muon_is_bit_equal(recipe, interrupted):
    options = ("adapter={kind: none}", "train.optim=muon", "train.learning_rate=5e-3", "eval.samples=0")
    whole = run_recipe(recipe(*options, "train.max_steps=8"))
    expected = load_file(whole / "model.safetensors")
    other = recipe(*options, "train.max_steps=8", f"train.output_dir={whole}-again")
    with interrupted():
        run_recipe(other)
    saved = torch.load(f"{whole}-again/checkpoint-5/optimizer.pt", weights_only=True)
    assert {group["use_muon"] for group in saved["param_groups"]} == {True, False}
    assert {frozenset(state) for state in saved["state"].values()} == {
        frozenset({"momentum_buffer"}),
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }
    found = load_file(run_recipe(other, resume=True) / "model.safetensors")
    assert all(expected[name].equal(found[name]) for name in expected)


def test_a_group_that_is_added_later_is_adamws():
    matrix, vector = nn.Parameter(torch.eye(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [matrix], "use_muon": True, "weight_decay": 0.0}]
    optimizer = MuonAdamW(groups, lr=0.1, betas=(0.9, 0.999), eps=1e-8, muon=muon_settings(None, 0.1))
    optimizer.add_param_group({"params": [vector], "weight_decay": 0.0})
    twin = nn.Parameter(torch.ones(3))
    alone = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.0)
    vector.grad = twin.grad = torch.tensor([1.0, -2.0, 3.0])
    optimizer.step(), alone.step()
    assert torch.equal(vector, twin) and torch.equal(matrix, torch.eye(3))
    again = MuonAdamW(groups, lr=0.1, betas=(0.9, 0.999), eps=1e-8, muon=muon_settings(None, 0.1))
    again.add_param_group({"params": [vector]})
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.state[vector]["exp_avg"].equal(optimizer.state[vector]["exp_avg"])
    assert again.parts[False].state is again.state and again.parts[True].param_groups[0] is again.param_groups[0]


WRONG_SETTINGS = [
    ("rate=1", "'rate=1' is no setting of muon; it takes lr="),
    ("lr", "'lr' is no setting of muon"),
    ("ns_steps=five", "ns_steps of muon cannot be 'five'"),
    ("nesterov=perhaps", "nesterov of muon cannot be 'perhaps'"),
    ("adjust_lr_fn=none", "none is not supported"),
    ("lr=-1", "Learning rate should be >= 0"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_SETTINGS)
def test_wrong_settings_of_muon(recipe, text, message):
    with pytest.raises(UserError, match="train.optim_args: .*" + message):
        run_recipe(recipe("train.optim=muon", f"train.optim_args='{text}'"), dry_run=True)


def test_muon_needs_a_torch_that_has_it_and_a_matrix(tiny, tmp_path, monkeypatch):
    model = tiny()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    with pytest.raises(UserError, match="none of them is trained"):
        trainer_of(model, tmp_path, optim="muon").create_optimizer()
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match=r"muon needs torch 2\.9 or newer"):
        muon_settings(None, 1e-3)


def test_lora_plus_and_muon_contradict_each_other(recipe):
    with pytest.raises(UserError, match=r"adapter\.lora_plus_lr_ratio: .*muon"):
        recipe("train.optim=muon", "adapter.lora_plus_lr_ratio=16")


# Weight decay

BIASED = {"attention_bias": True, "mlp_bias": True, "lm_head_bias": True, "qk_norm": "head", "embedding_norm": True}
WHERE = {
    **{norm: {"norm": norm} for norm in NORMS},
    **{place: {"norm_position": place} for place in ("post", "sandwich", "branch", "parallel", "parallel_dual")},
    "experts": {
        "num_experts": 4,
        "router_bias": True,
        "shared_expert_intermediate_size": 8,
        "shared_expert_gate": True,
    },
    "latent": {
        "attention": "mla",
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "num_key_value_heads": None,
        "qk_norm": "none",
    },
    "sinks": {"attention_sinks": True, "attn_implementation": "eager"},
    "encoder": {"architecture": "encoder", "head": "masked_lm", "head_transform": True, "norm": "layernorm"},
    "both": {"architecture": "encoder-decoder", "head": "seq2seq_lm", "decoder_start_token_id": 1},
}


@pytest.mark.parametrize("fields", WHERE.values(), ids=WHERE)
def test_weight_decay_spares_norms_and_biases(tiny, tmp_path, fields):
    model = tiny(**(BIASED | fields))
    trainer = extended(Trainer)(model, training_arguments(ARGUMENTS, {"output_dir": str(tmp_path), "use_cpu": True}))
    decayed = set(trainer.get_decay_parameter_names(model))
    kinds = tuple(NORMS[name] for name in NORMS)
    in_norms = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        for part, _ in module.named_parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        spared = name in in_norms or parameter.dim() == 1 or name.endswith("bias")
        assert (name in decayed) is not spared, name
    assert any(parameter.dim() == 1 for parameter in model.parameters())


def test_a_step_decays_what_it_should(tiny, tmp_path):
    """Without a gradient AdamW only decays: by 1 - rate * decay."""
    model = tiny(**BIASED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = trainer_of(model, tmp_path, weight_decay=0.1)
    trainer.create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 1.0 if "norm" in name or name.endswith("bias") else 1 - 1e-2 * 0.1
        torch.testing.assert_close(parameter.detach(), kept * before[name], rtol=1e-6, atol=1e-7)


# Clipping


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_by_hand(tiny, tmp_path, limit):
    model = tiny()
    twin = copy.deepcopy(model).train()
    options = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": limit}
    trainer = trainer_of(model, tmp_path, max_steps=1, **options)
    seen = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    trainer.train()
    twin(**seen[0]).loss.backward()
    norm = sum((p.grad.double() ** 2).sum() for p in twin.parameters()).sqrt().item()
    assert logs_of(trainer)[0]["grad_norm"] == pytest.approx(norm, rel=1e-5) and norm > 0.5  # before clipping
    share = min(1.0, limit / norm)
    for found, start in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), (start - share * start.grad).detach(), rtol=1e-4, atol=1e-5)


# Precision


def test_mixed_precision_keeps_weights_and_states_in_fp32_and_loses_no_small_update(tiny, tmp_path):
    options = {"optim": "sgd", "learning_rate": 1e-5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}

    def moved(dtype, **train):
        model = tiny().to(dtype)
        with torch.no_grad():
            model.model.norm.weight.fill_(1.0)
        seen = []
        model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: seen.append(output.dtype))
        trainer_of(model, tmp_path, max_steps=1, **options, **train).train()
        return (model.model.norm.weight.detach().float() - 1).abs().max().item(), seen, model

    step, kinds, model = moved(torch.float32, bf16=True)
    assert kinds == [torch.bfloat16] and {p.dtype for p in model.parameters()} == {torch.float32}
    assert 0 < step < 2**-9  # less than bf16 can tell from 1
    assert moved(torch.bfloat16)[0] == 0


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "adafactor", "muon"])
def test_states_are_fp32_under_mixed_precision(tiny, tmp_path, name):
    trainer = trainer_of(tiny(), tmp_path, optim=name, bf16=True)
    trainer.train()
    states = [v for state in inner(trainer).state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert states and {v.dtype for v in states} == {torch.float32}
    assert {p.grad.dtype for p in trainer.model.parameters() if p.grad is not None} <= {torch.float32}
