"""What a step of generation does with fewer operators, beside the usual way."""

import copy

import pytest
import torch

from anyformer.modeling.growing_cache import GrowingLayer
from anyformer.modeling.norms import NORMS_OF_THIS_PACKAGE, AnyformerRMSNorm
from anyformer.modeling.positions import apply_rotary, rotary_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS_OF_THIS_PACKAGE)
def test_a_norm_of_one_row(kind, dtype):
    norm = kind(48, 1e-5).to(dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    row = 3 * torch.randn(1, 1, 48).to(dtype)
    with torch.inference_mode():
        got, want = norm.of_row(row), norm(row)
        # Of 16 bits: one step where the factor is rounded at all.
        torch.testing.assert_close(got, want, rtol=1e-6 if dtype is torch.float32 else 2**-7, atol=1e-6)
        assert got.shape == row.shape and torch.equal(norm.of_row(0 * row), norm(0 * row))


def test_a_row_of_zeros_without_eps_is_as_undefined_as_ever():
    norm, zeros = AnyformerRMSNorm(4, 0.0), torch.zeros(1, 1, 4)
    with torch.inference_mode():
        assert norm(zeros).isnan().all() and norm.of_row(zeros).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "interleaved"), [(16, False), (16, True), (8, False), (8, True)])
def test_a_rotation_made_for_many_layers(width, interleaved, dtype):
    heads, angles = torch.randn(2, 3, 5, 16).to(dtype), torch.randn(2, 5, width)
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    got, want = rotary_of(rotation, 16, interleaved)(heads), apply_rotary(heads, *rotation, interleaved)
    torch.testing.assert_close(
        got, want, rtol=1e-6 if dtype is torch.float32 else 2**-6, atol=1e-6 + dtype.itemsize % 4 / 64
    )


def tokens(*numbers):
    return torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1)


def held(layer):
    return layer.keys.flatten().tolist(), layer.values.flatten().tolist()


def grow(layer, *numbers):
    with torch.no_grad():
        return [x.flatten().tolist() for x in layer.update(tokens(*numbers), tokens(*numbers))]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_copies_of_a_cache_that_hold_the_same_view_go_on_apart(order):
    layers = [GrowingLayer()]
    grow(layers[0], 1, 2, 3)
    layers.append(copy.copy(layers[0]))  # the same buffers
    assert layers[0].keys is layers[1].keys
    first, second = (layers[number] for number in order)
    for length, number in enumerate((5, 6, 7), start=1):
        assert grow(first, number)[0] == [1, 2, 3, *(5, 6, 7)[:length]]
        assert grow(second, -number)[1] == [1, 2, 3, *(-5, -6, -7)[:length]]


def test_a_cache_that_was_put_back_writes_where_its_tokens_end():
    layer = GrowingLayer()
    grow(layer, 1, 2, 3)
    before = layer.keys, layer.values
    layer.crop(-1)  # tokens that are taken away
    layer.keys, layer.values = before
    assert grow(layer, 4) == [[1, 2, 3, 4]] * 2


def test_a_cache_grows_in_another_type():
    layer = GrowingLayer()
    grow(layer, 1, 2)
    with torch.no_grad():
        keys, _ = layer.update(tokens(3).double(), tokens(3).double())
    assert keys.dtype is torch.float64 and held(layer) == ([1, 2, 3], [1, 2, 3])
