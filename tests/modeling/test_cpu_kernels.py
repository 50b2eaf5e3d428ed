"""Kernels of inference on CPUs against the same in fp64."""

import pytest
import torch

from anyformer.modeling import cpu_kernels


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


def test_what_is_kept_is_of_cpus_whatever_the_default_is():
    cpu_kernels._parts.cache_clear()
    states, weight = torch.randn(1, 37), torch.randn(5, 37)
    right = states @ weight.t()
    with torch.device("meta"):
        cpu_kernels._parts(37, torch.get_num_threads())
        assert {x.device.type for x in (*cpu_kernels._example(torch.float32)[1:],)} == {"cpu"}
    torch.testing.assert_close(cpu_kernels.of_columns(states, weight.t().contiguous())[None], right, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "ask",
    [cpu_kernels.columns_are_faster, lambda: cpu_kernels.sorting_is_faster(torch.float32)],
    ids=["columns", "sorting"],
)
def test_what_is_measured_is_measured_once(ask, monkeypatch):
    """And answered, whatever the answer is on this processor."""
    assert ask() in (True, False)
    monkeypatch.setattr(cpu_kernels, "least_seconds", None)
    assert ask() in (True, False)
