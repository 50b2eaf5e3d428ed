"""Routers, experts and their losses against formulas and hand-written loops."""

import pytest
import torch
from torch import nn

from anyformer import AnyformerConfig
from anyformer.modeling.losses import load_balancing_loss, router_z_loss
from anyformer.modeling.registry import ROUTERS

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
BALANCED = EXPERTS | {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01}


def ids(*shape, low=3, high=101, seed=1):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def router(**fields):
    config = AnyformerConfig(**{"hidden_size": 16, "num_attention_heads": 2} | EXPERTS | fields)
    made = ROUTERS[config.router](config)
    nn.init.normal_(made.weight)
    return made


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [True, False])
def test_choice_against_a_loop(kind, normalised):
    made = router(router=kind, norm_topk_prob=normalised, routed_scaling_factor=2.5, router_score_bias=True)
    made.e_score_correction_bias.copy_(torch.randn(8))
    logits = torch.randn(5, 8)
    weights, indices, _ = made.choose(logits)
    for row in range(5):
        scores = (logits[row].softmax(0) if kind == "softmax" else logits[row].sigmoid()).tolist()
        order = sorted(range(8), key=lambda e: -(scores[e] + made.e_score_correction_bias[e].item()))[:2]
        total = sum(scores[e] for e in order) if normalised else 1.0
        assert indices[row].tolist() == order
        expected = torch.tensor([2.5 * scores[e] / total for e in order])
        torch.testing.assert_close(weights[row], expected)


@pytest.mark.parametrize(("score", "winners"), [("max", [6, 7]), ("top2", [2, 3])])
def test_experts_come_from_the_best_groups(score, winners):
    made = router(n_group=4, topk_group=1, group_score=score)
    logits = torch.tensor([[-9.0, -9.0, 1.0, 1.0, -9.0, -9.0, 1.5, -9.0]])
    assert sorted(made.choose(logits)[1][0].tolist()) == winners


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_an_even_router_has_a_balancing_loss_of_one_whatever_the_top_k(kind, top_k):
    loss = load_balancing_loss(torch.zeros(32, 8), router(router=kind, num_experts_per_tok=top_k))
    torch.testing.assert_close(loss, torch.tensor(1.0))
    uneven = load_balancing_loss(torch.tensor([[9.0] + [0.0] * 7]).expand(32, -1), router(num_experts_per_tok=1))
    assert uneven > 7


def test_z_loss_against_its_formula():
    logits = torch.randn(6, 8)
    expected = logits.exp().sum(-1).log().pow(2).mean()
    torch.testing.assert_close(router_z_loss(logits), expected)


def test_padding_changes_no_router_loss(tiny):
    model = tiny(**BALANCED)
    tokens, pads = ids(2, 7), torch.zeros(2, 5, dtype=torch.long)
    plain = model(tokens, labels=tokens)
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(tokens)], 1)
    labels = torch.cat([torch.full_like(pads, -100), tokens], 1)
    labels[:, 5] = -100  # what the padding before it would predict
    left = model(torch.cat([pads, tokens], 1), attention_mask=mask, labels=labels)
    torch.testing.assert_close(left.aux_loss, plain.aux_loss)
    torch.testing.assert_close(left.loss, plain.loss)


def test_router_losses_do_not_depend_on_accumulation(tiny):
    model, tokens = tiny(**BALANCED), ids(1, 8)
    once = model(tokens, labels=tokens).loss
    halves = [model(tokens, labels=tokens, num_items_in_batch=torch.tensor(14)).loss for _ in range(2)]
    torch.testing.assert_close(sum(halves), once)


def test_the_loss_holds_the_router_losses_with_their_coefficients(tiny):
    tokens = ids(2, 8)
    model, plain = tiny(**BALANCED), tiny(**EXPERTS)
    output = model(tokens, labels=tokens, output_router_logits=True)
    z = torch.stack([router_z_loss(logits) for logits in output.router_logits]).mean()
    expected = plain(tokens, labels=tokens).loss + 0.1 * output.aux_loss + 0.01 * z
    torch.testing.assert_close(output.loss, expected)
    assert [logits.shape for logits in output.router_logits] == [(16, 8)] * 2


@pytest.mark.parametrize("mlp", ["gated", "dense", "clamped"])
@pytest.mark.parametrize("bias", [True, False])
def test_every_implementation_of_the_experts_agrees(tiny, mlp, bias):
    model = tiny(**EXPERTS, mlp=mlp, mlp_bias=bias, shared_expert_intermediate_size=10).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_()
    tokens, results = ids(2, 9), {}
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        results[implementation] = loss.detach(), model.model.layers[0].mlp.experts.down_proj.grad.clone()
    for loss, gradient in results.values():
        torch.testing.assert_close(loss, results["eager"][0], rtol=0, atol=1e-5)
        torch.testing.assert_close(gradient, results["eager"][1], rtol=0, atol=1e-5)


def test_grouped_products_are_the_default(tiny):
    assert tiny(**EXPERTS).config._experts_implementation == "grouped_mm"


def test_experts_against_a_loop_over_tokens(tiny):
    block = tiny(**EXPERTS, shared_expert_intermediate_size=10, shared_expert_gate=True).model.layers[0].mlp
    hidden = torch.randn(1, 3, 32)
    with torch.no_grad():
        got = block(hidden)
        _, weights, indices = block.router(hidden[0])
        for token in range(3):
            x, expected = hidden[0, token], torch.zeros(32)
            for weight, expert in zip(weights[token], indices[token], strict=True):
                gate, up = (block.experts.gate_up_proj[expert] @ x).chunk(2)
                expected += weight * (block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
            expected += torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
            torch.testing.assert_close(got[0, token], expected, rtol=0, atol=1e-5)


def test_choosing_biases_move_towards_an_even_load_and_padding_is_no_load(tiny):
    model = tiny(**EXPERTS, router_score_bias=True, router_bias_update_rate=0.5).train()
    tokens = ids(1, 6)
    model(tokens, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]))
    routers = [layer.mlp.router for layer in model.model.layers]
    loads = [made.load.clone() for made in routers]
    assert all(load.sum() == 4 * 2 for load in loads)
    model.update_router_biases()
    for made, load in zip(routers, loads, strict=True):
        assert torch.equal(made.e_score_correction_bias, 0.5 * torch.sign(load.mean() - load))
        assert (made.load == 0).all()
    model.eval()(tokens)
    assert (routers[0].load == 0).all()


def test_router_losses_under_reentrant_checkpointing_are_refused_not_dropped(tiny):
    model, tokens = tiny(**BALANCED).train(), ids(2, 6)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="'use_reentrant': False"):
        model(tokens, labels=tokens)


def test_an_encoder_may_lack_the_decoders_sparse_layers(tiny):
    shape = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1}
    model = tiny(**BALANCED, **shape, num_encoder_layers=1, mlp_layer_types=["dense", "sparse"])
    tokens = ids(2, 6)
    assert model(tokens, labels=tokens).loss.isfinite()


def test_choosing_biases_stay_in_fp32_and_keep_small_steps(tiny, tmp_path):
    model = tiny(**EXPERTS, router_score_bias=True, router_bias_update_rate=0.001).to(torch.bfloat16)
    made = model.model.layers[0].mlp.router
    made.e_score_correction_bias.fill_(0.5)
    for _ in range(20):
        made.load.copy_(torch.tensor([0.0] + [1.0] * 7))
        made.update_bias()
    torch.testing.assert_close(made.e_score_correction_bias, torch.tensor([0.52] + [0.48] * 7))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).model.layers[0].mlp.router
    assert torch.equal(again.e_score_correction_bias, made.e_score_correction_bias)
    assert again.weight.dtype == torch.bfloat16


def test_dropout_reaches_the_experts(tiny):
    for mlp in ("gated", "dense"):
        block = tiny(**EXPERTS, mlp=mlp, activation_dropout=0.5).train().model.layers[0].mlp
        hidden = torch.randn(1, 4, 32)
        assert not torch.equal(block(hidden), block(hidden))
        block.eval()
        assert torch.equal(block(hidden), block(hidden))


def test_load_after_the_meta_device_is_zero(tiny):
    model = tiny(**EXPERTS, router_score_bias=True)
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.to_empty(device="cpu")
    assert all((layer.mlp.router.load == 0).all() for layer in empty.model.layers)
