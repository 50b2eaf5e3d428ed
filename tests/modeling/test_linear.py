"""Linear layers of 16-bit weights that are multiplied in fp32: as exact as torch's, and theirs in all else."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from anyformer import AnyformerConfig, AnyformerForCausalLM, to_hf
from anyformer.modeling import linear
from anyformer.modeling.linear import FEW_ROWS, better_in_fp32, project
from anyformer.modeling.plain import is_plain

ROWS = FEW_ROWS + 5


@pytest.fixture(autouse=True)
def slow_in_16_bits(monkeypatch):
    """Whatever processor this is."""
    monkeypatch.setattr(linear, "SLOW_IN_16_BITS", True)


def layers(bias, dtype=torch.bfloat16):
    """A layer, and the same in fp64."""
    torch.manual_seed(0)
    layer, exact = nn.Linear(48, 32, bias=bias).to(dtype), nn.Linear(48, 32, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    return layer, exact


def passed(call, layer, states, slope):
    """Output and all gradients for states of the layer's type."""
    states = states.detach().to(layer.weight.dtype, copy=True).requires_grad_()
    output = call(layer, states)
    output.backward(slope.to(output.dtype))
    return [output, states.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_everything_is_the_exact_value_rounded_once(bias, dtype):
    layer, exact = layers(bias, dtype)
    states, slope = torch.randn(3, ROWS, 48).to(dtype), torch.randn(3, ROWS, 32).to(dtype)
    assert better_in_fp32(states, layer.weight)
    half_a_unit = torch.finfo(dtype).eps / 2
    for got, right in zip(
        passed(project, layer, states, slope), passed(nn.Linear.__call__, exact, states, slope), strict=True
    ):
        assert got.dtype == dtype and got.shape == right.shape
        # Beside the rounding, what sums of fp32 are off by.
        torch.testing.assert_close(got.double(), right, rtol=1.001 * half_a_unit, atol=1e-4)


@pytest.mark.parametrize("frozen", ["weight", "bias", "states"])
def test_what_is_frozen_gets_no_gradient(frozen):
    layer, _ = layers(True)
    states, slope = torch.randn(ROWS, 48).bfloat16(), torch.randn(ROWS, 32).bfloat16()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name != frozen)
    found = []
    for call in (project, nn.Linear.__call__):
        layer.zero_grad()
        given = states.clone().requires_grad_(frozen != "states")
        call(layer, given).backward(slope)
        found.append([given.grad, layer.weight.grad, layer.bias.grad])
    for got, expected in zip(*found, strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(got, expected)


def test_what_is_kept_for_backward_has_16_bits():
    layer, _ = layers(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.dtype) or tensor, lambda t: t):
        project(layer, torch.randn(ROWS, 48).bfloat16().requires_grad_())
    assert kept == [torch.bfloat16, torch.bfloat16]


def test_a_second_derivative():
    """As torch's layer has, for penalties on gradients."""
    layer, _ = layers(False)
    states, found = torch.randn(ROWS, 48).bfloat16(), []
    for call in (project, nn.Linear.__call__):
        layer.zero_grad()
        given = states.clone().requires_grad_()
        (slope,) = torch.autograd.grad(call(layer, given).float().pow(2).sum(), given, create_graph=True)
        slope.float().pow(2).sum().backward()
        found.append(layer.weight.grad.clone())
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2 * float(found[1].abs().max()))


@pytest.mark.parametrize(
    "other",
    ["few rows", "fp32", "other types", "a fast processor", "a weight of another class"],
)
def test_where_torchs_own_product_is_taken(monkeypatch, other):
    class Quantised(nn.Parameter):
        pass

    states, weight = torch.randn(ROWS, 48).bfloat16(), nn.Parameter(torch.randn(32, 48).bfloat16())
    assert better_in_fp32(states, weight)
    if other == "few rows":
        states = states[: FEW_ROWS - 1]
    elif other == "fp32":
        states, weight = states.float(), nn.Parameter(weight.float())
    elif other == "other types":
        weight = nn.Parameter(weight.float())
    elif other == "a fast processor":
        monkeypatch.setattr(linear, "SLOW_IN_16_BITS", False)
    else:
        weight = Quantised(weight.detach())
    assert not better_in_fp32(states, weight)


def test_autocast_keeps_its_type(monkeypatch):
    monkeypatch.setattr(linear._InFp32, "apply", None)
    layer, _ = layers(True)
    states = torch.randn(ROWS, 48).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(project(layer, states), layer(states))


def test_what_is_more_than_its_weight_is_called(monkeypatch):
    monkeypatch.setattr(linear._InFp32, "apply", None)
    layer, _ = layers(True)
    assert is_plain(layer)
    seen = []
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    project(layer, torch.randn(ROWS, 48).bfloat16())
    assert seen and not is_plain(layer)
    handle.remove()
    layer.forward = lambda states: "its own"
    assert project(layer, torch.randn(ROWS, 48).bfloat16()) == "its own" and not is_plain(layer)
    assert project(nn.Identity(), torch.ones(ROWS, 2).bfloat16()).shape == (ROWS, 2)


def test_a_compiled_block_is_one_graph():
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = AnyformerConfig(
        vocab_size=11, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    block = AnyformerForCausalLM(config).to(torch.bfloat16).model.layers[0].mlp
    states = torch.randn(1, ROWS, 32).bfloat16()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    found = []
    for call in (block, compiled):
        given = states.clone().requires_grad_()
        call(given).float().sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(*found)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = AnyformerConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    return AnyformerForCausalLM(config)


def losses(model, steps=3):
    """Of steps of AdamW on the same rows."""
    tokens = torch.randint(3, 101, (4, 80), generator=torch.Generator().manual_seed(1))
    optimizer, found = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_trains_as_the_stock_class_in_bf16(model, checkpointing):
    ours, stock = (other.to(torch.bfloat16).train() for other in (AnyformerForCausalLM(model.config), to_hf(model)))
    ours.load_state_dict(model.state_dict())
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    got, expected = losses(ours), losses(stock)
    assert got[-1] < got[0] - 0.3
    # Rounding to 8 bits, in another order of sums.
    torch.testing.assert_close(got, expected, rtol=5e-3, atol=0)


def test_adapters_train_on_it(model):
    base = AnyformerForCausalLM(model.config).to(torch.bfloat16).train()
    before = base.model.layers[0].mlp.up_proj.weight.detach().clone()
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    found = losses(tuned)
    assert found[-1] < found[0]
    assert torch.equal(tuned.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight, before)
