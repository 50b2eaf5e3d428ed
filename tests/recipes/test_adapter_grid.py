"""Adapters of weights on every kind of positions in every shape, on latent attention and on experts.

The sections are a recipe's, so the places are those that the suite chooses. Oracles: the plain backward pass, the row
without padding, the adapter beside its weights, and generation without a cache.
"""

from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel

from anyformer.recipes.adapters import attach, merge, peft_config
from anyformer.recipes.schema.recipe import adapter_model

LENGTH, PADDING, STEPS = 7, 3, 4
POSITIONS = ("rope", "learned", "sinusoidal", "alibi", "relative", "none")
# Head, and PEFT's task for it.
SHAPES = {
    "decoder": ("causal_lm", "CAUSAL_LM"),
    "encoder": ("masked_lm", "FEATURE_EXTRACTION"),
    "encoder-decoder": ("seq2seq_lm", "SEQ_2_SEQ_LM"),
}
MODELS = {f"{shape}-{p}": (shape, {"position_embedding": p}) for shape in SHAPES for p in POSITIONS}
LATENT = {"attention": "mla", "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
MODELS["mla"] = ("decoder", LATENT | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8})
MODELS["moe"] = ("decoder", {"num_experts": 4, "num_experts_per_tok": 2})
ADAPTERS = {
    "lora": {"kind": "lora", "r": 4},
    "dora": {"kind": "lora", "r": 4, "use_dora": True},
    "pissa": {"kind": "lora", "r": 4, "target_parts": ["attention"], "init_lora_weights": "pissa"},
    "ia3": {"kind": "ia3"},
    "experts": {"kind": "lora", "r": 4, "target_parts": ["experts"]},
}
GRID = [(m, a) for m in MODELS for a in ADAPTERS if a != "experts" or m == "moe"]
TOKENS = torch.randint(3, 101, (2, LENGTH), generator=torch.Generator().manual_seed(1))
PADDED = torch.nn.functional.pad(TOKENS, (PADDING, 0))


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.fixture
def build(tiny):
    """A function: the plain model of a name, always with the same weights."""

    def plain(name):
        shape, fields = MODELS[name]
        start = {"decoder_start_token_id": 1} if shape == "encoder-decoder" else {}
        return tiny(head=SHAPES[shape][0], architecture=shape, initializer_range=0.1, **start, **fields)

    return plain


@pytest.fixture
def adapted(build):
    """A function: the model under an adapter whose every weight is moved, so that it changes much."""

    def tuned(name, adapter):
        model = build(name)
        section = adapter_model(ADAPTERS[adapter]["kind"]).model_validate(ADAPTERS[adapter])
        objective = SimpleNamespace(task_type=SHAPES[MODELS[name][0]][1])
        model = attach(model, peft_config(section, objective, model)).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in trained(model).values():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
        return model

    return tuned


def trained(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@torch.no_grad()
def logits(model, name, tokens=TOKENS):
    mask = {"attention_mask": (tokens != 0).long()} if (tokens == 0).any() else {}
    written = {"decoder_input_ids": TOKENS} if MODELS[name][0] == "encoder-decoder" else {}
    return model(input_ids=tokens, **mask, **written).logits


def gradients(model):
    """Gradients of the adapter by name, and how many values were kept for the backward pass."""
    model.zero_grad()
    model.train()  # the config has no dropout; checkpointing works in training alone
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    model.eval()
    found = {name: weight.grad.clone() for name, weight in trained(model).items() if weight.grad is not None}
    return found, sum(kept)


def check_gradients(model):
    """They reach every weight of the adapter, and are the same with gradient checkpointing."""
    plain, kept = gradients(model)
    assert plain and plain.keys() == trained(model).keys()
    still = [name for name, gradient in plain.items() if not gradient.any()]
    assert not still, still
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    again, fewer = gradients(model)
    model.get_base_model().gradient_checkpointing_disable()
    assert fewer < kept / 2, "nothing was checkpointed"
    assert again.keys() == plain.keys()
    for name, gradient in plain.items():
        close(again[name], gradient)


def check_generation(model, name):
    """Greedy steps with a cache, behind left padding, are those without one."""
    batch = {"input_ids": PADDED, "attention_mask": (PADDED != 0).long()}
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    cached, uncached = (model.generate(**batch, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    assert len(cached.logits) == STEPS
    close(torch.stack(cached.logits), torch.stack(uncached.logits))


@pytest.mark.parametrize(("name", "adapter"), GRID, ids=["-".join(pair) for pair in GRID])
def test_an_adapter_trains_and_computes_the_same_in_every_way(build, adapted, tmp_path, name, adapter):
    model = adapted(name, adapter)
    expected = logits(model, name)
    assert (expected - logits(build(name), name)).abs().max() > 1e-2, "the adapter changes nothing here"
    check_gradients(model)

    behind = logits(model, name, PADDED)
    close(behind if MODELS[name][0] == "encoder-decoder" else behind[:, PADDING:], expected)

    if MODELS[name][0] != "encoder":
        check_generation(model, name)

    model.save_pretrained(tmp_path)
    close(logits(PeftModel.from_pretrained(build(name), tmp_path).eval(), name), expected)
    close(logits(merge(model), name), expected)
