"""PPO's arithmetic against loops and numbers, and its config against its source."""

import dataclasses
import math

import pytest
import torch

from anyformer.recipes.introspection import class_fields
from anyformer.recipes.ppo.functions import (
    AdaptiveKL,
    clipped_policy_loss,
    clipped_value_loss,
    completion_mask,
    gae,
    kl_penalty,
    whiten,
)
from anyformer.recipes.ppo_config import PPOConfig

# Three rows of 4, 2 and 1 tokens; what stands behind them is not even a number.
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
LENGTHS = (4, 2, 1)


def ragged(*rows: list[float]) -> torch.Tensor:
    return torch.tensor([[*row, *[math.nan] * (4 - len(row))] for row in rows])


REWARDS = ragged([0.1, -0.2, 0.3, 1.0], [0.5, -1.0], [2.0])
VALUES = ragged([0.4, 0.2, -0.1, 0.6], [1.0, 0.3], [-0.5])


# Arithmetic


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.7, 1.0), (1.0, 0.0)])
def test_gae_is_the_discounted_sum_of_temporal_differences(gamma, lam):
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma, lam)
    for row, length in enumerate(LENGTHS):
        r, v = REWARDS[row, :length].tolist(), [*VALUES[row, :length].tolist(), 0.0]
        for t in range(length):
            # eq. 16: the sum over l of (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l})
            wanted = sum((gamma * lam) ** (s - t) * (r[s] + gamma * v[s + 1] - v[s]) for s in range(t, length))
            assert advantages[row, t].item() == pytest.approx(wanted, abs=1e-6)
            assert returns[row, t].item() == pytest.approx(wanted + v[t], abs=1e-6)
    assert not advantages[~MASK].any() and not returns[~MASK].any()


def test_gae_in_numbers():
    advantages, returns = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]]), MASK[1:2, :2], 0.5, 0.5)
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0 + 0.5 * 0.25 - 0.5 = -0.375; A_0 = -0.375 + 0.25 * 0.75 = -0.1875
    assert advantages.tolist() == [[-0.1875, 0.75]]
    assert returns.tolist() == [[0.3125, 1.0]]


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_takes_mean_and_variance_over_the_mask(shift_mean):
    whitened = whiten(REWARDS, MASK, shift_mean=shift_mean)
    values = [value for row, length in enumerate(LENGTHS) for value in REWARDS[row, :length].tolist()]
    mean = sum(values) / 7
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 7)
    wanted = [(value - mean) / deviation + (0 if shift_mean else mean) for value in values]
    assert whitened[MASK].tolist() == pytest.approx(wanted, abs=1e-6)
    assert not whitened[~MASK].any()


def test_whiten_of_equal_values_is_zero():
    assert whiten(torch.full((1, 4), 3.0), MASK[:1]).tolist() == [[0.0] * 4]


def test_policy_loss_is_clipped_where_that_is_the_worse():
    # Ratios 1.5, 0.5, 1.5, 0.5 under advantages 1, 1, -1, -1: the first and the last are clipped.
    old = ragged([-1.0, -1.0, -1.0, -1.0], [-2.0, -3.0], [-0.5])
    new = old + ragged([math.log(1.5), math.log(0.5)] * 2, [math.log(1.1), 0.0], [math.log(0.95)])
    advantages = ragged([1.0, 1.0, -1.0, -1.0], [2.0, -3.0], [-0.25])
    loss, clipped = clipped_policy_loss(new, old, advantages, MASK, 0.2)
    terms = [1.2 * 1, 0.5 * 1, 1.5 * -1, 0.8 * -1, 1.1 * 2, 1 * -3, 0.95 * -0.25]
    assert loss.item() == pytest.approx(-sum(terms) / 7, abs=1e-6)
    assert clipped.item() == pytest.approx(2 / 7)


def test_value_loss_takes_the_larger_error():
    old = ragged([0.0, 0.0, 1.0, 1.0], [0.5, 0.5], [0.0])
    new = ragged([0.1, 0.5, 0.0, 1.3], [0.5, -0.5], [0.3])
    returns = ragged([1.0, 1.0, 1.0, 2.0], [0.5, -0.5], [-1.0])
    loss = clipped_value_loss(new, old, returns, MASK, 0.2)
    # new - return, and old moved by at most 0.2 towards new - return
    errors = [
        max(0.9**2, 0.9**2),
        max(0.5**2, 0.8**2),
        max(1.0**2, 0.2**2),
        max(0.7**2, 0.8**2),
        0.0,
        max(0.0, 0.8**2),
        max(1.3**2, 1.2**2),
    ]
    assert loss.item() == pytest.approx(0.5 * sum(errors) / 7, abs=1e-6)


def test_losses_of_parts_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(3, 4, generator=generator) for _ in range(3))
    tokens = MASK.sum()
    for loss in (
        lambda rows, n: clipped_policy_loss(new[rows], old[rows], advantages[rows], MASK[rows], 0.2, n)[0],
        lambda rows, n: clipped_value_loss(new[rows], old[rows], advantages[rows], MASK[rows], 0.2, n),
    ):
        parts = loss(slice(0, 1), tokens) + loss(slice(1, 3), tokens)
        assert parts.item() == pytest.approx(loss(slice(0, 3), None).item(), abs=1e-6)


def test_padding_changes_no_loss_and_gets_no_gradient():
    logps = torch.full((3, 4), -1.0, requires_grad=True)
    old, advantages = torch.full((3, 4), -2.0), torch.ones(3, 4)
    results = []
    for garbage in (0.0, 1e30, math.inf):
        spoilt = advantages.masked_fill(~MASK, garbage), old.masked_fill(~MASK, -garbage)
        policy = clipped_policy_loss(logps, spoilt[1], spoilt[0], MASK, 5.0)[0]
        value = clipped_value_loss(logps, old, spoilt[0], MASK, 0.2)
        (gradient,) = torch.autograd.grad(policy, logps)
        assert not gradient[~MASK].any()
        results.append((policy.item(), value.item(), gradient[MASK].tolist()))
    assert results[0] == results[1] == results[2]


def test_kl_estimators():
    logps, ref_logps = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    assert kl_penalty(logps, ref_logps, "k1").tolist() == [[0.5, -1.0]]
    wanted = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    assert kl_penalty(logps, ref_logps, "k3")[0].tolist() == pytest.approx(wanted, abs=1e-6)


def test_both_estimators_have_the_divergence_as_their_mean():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    divergence = (p * (p / q).log()).sum().item()
    for estimator in ("k1", "k3"):
        assert (p * kl_penalty(p.log(), q.log(), estimator)).sum().item() == pytest.approx(divergence, abs=1e-6)


def test_adaptive_kl_follows_its_relative_error():
    steered = AdaptiveKL(0.1, target=6.0, horizon=1000)
    steered.update(6.6, 50)  # 10 % too much: 1 + 0.1 * 50 / 1000
    assert steered.beta == pytest.approx(0.1 * 1.005)
    steered.update(60.0, 50)  # the error counts as 20 % at most
    assert steered.beta == pytest.approx(0.1 * 1.005 * 1.01)
    steered.update(-3.0, 100)
    assert steered.beta == pytest.approx(0.1 * 1.005 * 1.01 * 0.98)
    fixed = AdaptiveKL(0.1, target=None, horizon=1000)
    fixed.update(60.0, 50)
    assert fixed.beta == 0.1


def test_completions_end_with_their_first_stop_token():
    tokens = torch.tensor([[5, 2, 2, 5], [3, 5, 9, 5], [5, 5, 5, 5]])
    assert completion_mask(tokens, [2, 9]).tolist() == [[True, True, False, False], [True] * 3 + [False], [True] * 4]
    assert completion_mask(tokens, []).all()


# Config


def test_a_recipe_reads_every_field_of_the_config():
    read = class_fields("anyformer.recipes.ppo_config", "PPOConfig")
    fields = {field.name: field for field in dataclasses.fields(PPOConfig) if field.init}
    assert set(read) == set(fields)
    own = [name for name in PPOConfig.__annotations__ if name in read]
    assert {"num_ppo_epochs", "kl_target", "missing_eos_penalty"} < set(own)
    for name in own:
        assert read[name].default == fields[name].default, name
        assert fields[name].metadata["help"], name
        assert f"{name}:" in PPOConfig.__doc__ or name in ("remove_unused_columns", "logging_steps"), name
    assert read["kl_target"].type == float | None
    assert "learning_rate" in read


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0: it must be above 0"),
        ({"max_prompt_length": 0}, "max_prompt_length is 0: it must be at least 1"),
        ({"cliprange": -0.2}, "cliprange is -0.2"),
        ({"lam": 1.5}, "lam is 1.5: it must be between 0 and 1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"kl_estimator": "k2"}, "kl_estimator is 'k2': it must be k1 or k3"),
        ({"beta": 0.0, "kl_target": 6.0}, "beta is 0.0: it must be above 0 where kl_target is set"),
        ({"num_mini_batches": 5, "per_device_train_batch_size": 2}, "num_mini_batches is 5: it must be at most 2"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path, values, message):
    with pytest.raises(ValueError) as error:
        PPOConfig(output_dir=str(tmp_path), **values)
    assert message in str(error.value)
