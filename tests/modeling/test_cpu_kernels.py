"""Kernels of inference on CPUs against the same in fp64."""

import pytest
import torch

from anyformer.modeling import cpu_kernels, one_query
from anyformer.modeling.growing_cache import GrowingLayer
from anyformer.modeling.one_query import attend_one, by_sums, row_steps

sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("sizes", [(1,), (192,), (193, 7, 400)])
def test_a_transposed_copy_is_that_of_all(sizes):
    weights = [torch.randn(size, 33)[:, ::3] for size in sizes]
    copy = cpu_kernels.transposed_copy(*weights)
    assert copy.is_contiguous() and torch.equal(copy, torch.cat(weights).t())


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("inputs", [1, 3, 512, 513, 5000])
def test_sums_of_columns_are_products(inputs, threads, monkeypatch):
    """No worse than torch's own product, whose sums are in parts too."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    states, weight = torch.randn(1, 1, inputs), torch.randn(70, inputs)
    right = states[0, 0].double() @ weight.double().t()
    got = cpu_kernels.of_columns(states, cpu_kernels.transposed_copy(weight))
    assert got.shape == (70,)
    assert (got - right).abs().max() <= 2e-7 * max(inputs, 16) ** 0.5 * right.abs().max()


def lying(kind: str, batch: int, heads: int, keys: int, width: int) -> torch.Tensor:
    """Values as they lie in the caches there are, and elsewhere."""
    if kind == "growing":  # room for more behind each head
        layer, held, one = GrowingLayer(), *(torch.randn(batch, heads, count, width) for count in (keys - 1, 1))
        layer.update(held, held)
        return layer.update(one, one)[1]
    if kind == "window":  # the last of more
        return torch.randn(batch, heads, keys + 9, width)[:, :, 9:]
    if kind == "pages":  # the heads of a token beside each other
        return torch.randn(batch, keys, heads, width).transpose(1, 2)
    if kind == "one for all":
        return torch.randn(1, 1, keys, width).expand(batch, heads, -1, -1)
    if kind == "latent":  # beside something else, whose width divides nothing
        return torch.randn(batch, heads, keys, width + 3)[..., :width]
    assert kind == "plain"
    return torch.randn(batch, heads, keys, width)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 3), (2, 1, 4), (2, 3, 1)], ids="{0[0]}x{0[1]}x{0[2]}".format)
@pytest.mark.parametrize("kind", ["plain", "growing", "window", "pages", "one for all", "latent"])
@pytest.mark.parametrize("keys", [7, 512, 1030])
def test_attention_by_sums(shape, kind, keys):
    batch, heads, group = shape
    query, key = torch.randn(batch, heads, group, 16), torch.randn(batch, heads, keys, 16)
    value = lying(kind, batch, heads, keys, 24)
    steps = row_steps(value)
    if kind == "latent" or (kind == "pages" and batch > 1 and heads > 1):
        assert steps is None
        return
    right = sdpa(query.double(), key.double(), value.double(), scale=0.3)
    got = by_sums(query, key, value, 0.3, steps)
    torch.testing.assert_close(got, right.float(), rtol=0, atol=1e-6)


@pytest.fixture
def by_sums_alone(monkeypatch):
    """Whether values were added up by rows, where that is faster for every shape."""
    taken: list[int] = []
    monkeypatch.setattr(one_query, "sums_are_faster", lambda *shape: True)
    monkeypatch.setattr(one_query, "by_sums", lambda *args: taken.append(1) or by_sums(*args))
    return taken


@pytest.mark.parametrize("scale", [None, 0.7])
def test_many_keys_without_a_mask_are_added_up(by_sums_alone, scale):
    query, key, value = torch.randn(2, 2, 3, 16), torch.randn(2, 2, 1024, 16), torch.randn(2, 2, 1024, 8)
    got = attend_one(query, key, value, None, scale)
    right = sdpa(query.double(), key.double(), value.double(), scale=scale)
    torch.testing.assert_close(got, right.float(), rtol=0, atol=1e-5)
    assert by_sums_alone == [1]


@pytest.mark.parametrize("reason", ["few", "mask", "bf16", "autocast", "latent"])
def test_what_sums_do_not_serve_is_left_to_torch(by_sums_alone, reason):
    keys, dtype = 1023 if reason == "few" else 1024, torch.bfloat16 if reason == "bf16" else torch.float32
    query, key = torch.randn(1, 2, 3, 16, dtype=dtype), torch.randn(1, 2, keys, 16, dtype=dtype)
    value = lying("latent" if reason == "latent" else "plain", 1, 2, keys, 16).to(dtype)
    if reason == "latent":
        value = torch.cat([value, value[..., :3]], -1)[..., :16]
    mask = torch.rand(1, 1, 1, keys) > 0.5 if reason == "mask" else None
    with torch.autocast("cpu", enabled=reason == "autocast"):
        got = attend_one(query, key, value, mask, None)
        torch.testing.assert_close(got, sdpa(query, key, value, attn_mask=mask), rtol=0, atol=0)
    assert by_sums_alone == []


@pytest.mark.parametrize("ask", [cpu_kernels.columns_are_faster, lambda: one_query.sums_are_faster(2, 2, 16, 16)])
def test_what_is_measured_is_measured_once(ask, monkeypatch):
    """And answered, whatever the answer is on this processor."""
    assert ask() in (True, False)
    monkeypatch.setattr(cpu_kernels, "least_seconds", None)
    monkeypatch.setattr(one_query, "least_seconds", None)
    assert ask() in (True, False)
