"""Advantages and losses against worked values, their defining properties, and gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_trainer.algorithms.grpo import STD_FLOOR, group_advantages
from polyreme_trainer.algorithms.losses import clipped_surrogate, importance_weights, k3, mismatch_kl


def test_advantages_of_a_worked_group() -> None:
    scores = np.array([[1.0, 0.0, 0.0, 1.0]])
    std = math.sqrt(1.0 / 3.0)  # four deviations of 1/2, squared, over n - 1
    expected = np.array([[0.5, -0.5, -0.5, 0.5]]) / (std + STD_FLOOR)
    np.testing.assert_allclose(group_advantages(scores, normalize_std=True), expected, rtol=1e-6)
    np.testing.assert_allclose(group_advantages(scores, normalize_std=False), [[0.5, -0.5, -0.5, 0.5]])


@given(
    st.integers(2, 9).flatmap(lambda n: st.lists(st.lists(st.floats(-100, 100), min_size=n, max_size=n), min_size=1, max_size=5)),
    st.booleans(),
)
def test_advantages_sum_to_zero_and_keep_the_order(rows: list[list[float]], normalize_std: bool) -> None:
    scores = np.array(rows)
    advantages = group_advantages(scores, normalize_std)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-3)
    for score, advantage in zip(scores, advantages, strict=True):
        order = np.argsort(score, kind="stable")
        assert (np.diff(advantage[order]) >= -1e-6).all()


@given(st.floats(-1e6, 1e6), st.integers(2, 12), st.booleans())
def test_a_constant_group_has_exactly_zero_advantages(score: float, n: int, normalize_std: bool) -> None:
    assert (group_advantages(np.full((3, n), score), normalize_std) == 0).all()


@pytest.mark.parametrize("scores", [np.zeros((2, 1)), np.zeros(3), np.array([[0.0, np.nan]]), np.array([[0.0, np.inf]])])
def test_scores_that_cannot_be_compared_are_refused(scores: np.ndarray) -> None:
    with pytest.raises(ValueError):
        group_advantages(scores, normalize_std=True)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.3, 0.0),  # clipped above: no reason to go further
        (1.5, -1.0, 1.5, 1.5),  # a bad token made likelier: not clipped
        (0.5, 1.0, -0.5, -0.5),  # a good token made rarer: not clipped
        (0.5, -1.0, 0.8, 0.0),  # clipped below
    ],
)
def test_the_surrogate_clips_on_the_right_side(ratio: float, advantage: float, expected: float, slope: float) -> None:
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = clipped_surrogate(new, torch.zeros(1), torch.tensor([advantage]), low=0.2, high=0.3)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(slope, rel=1e-6)


def test_on_policy_the_surrogate_is_the_policy_gradient() -> None:
    new = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    advantages = torch.randn(4, 1, generator=torch.Generator().manual_seed(1))
    clipped_surrogate(new, new.detach(), advantages, 0.2, 0.2).sum().backward()
    torch.testing.assert_close(new.grad, -advantages.expand(4, 7))


def test_a_far_off_ratio_stays_finite() -> None:
    new = torch.tensor([500.0, -500.0], requires_grad=True)
    loss = clipped_surrogate(new, torch.zeros(2), torch.tensor([-1.0, 1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()


logprob_pairs = st.lists(st.tuples(st.floats(-15, 0, width=32), st.floats(-15, 0, width=32)), min_size=1, max_size=20)


@given(logprob_pairs, st.floats(1, 10))
def test_importance_weights_are_the_ratio_up_to_the_cap(pairs: list[tuple[float, float]], cap: float) -> None:
    old, behaviour = (torch.tensor(x, dtype=torch.float32) for x in zip(*pairs, strict=True))
    weights = importance_weights(old, behaviour, cap)
    expected = [min(math.exp(p - mu), cap) for p, mu in pairs]
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-5, atol=0)
    assert (importance_weights(behaviour, behaviour, cap) == 1).all()


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_uncapped_weights_make_stale_tokens_an_unbiased_sample(seed: int) -> None:
    """Over the behaviour policy's tokens, the weighted gradient is that over tokens of the policy before the step."""
    generator = torch.Generator().manual_seed(seed)
    old, behaviour, new = torch.randn(3, 11, generator=generator, dtype=torch.float64).log_softmax(-1)
    advantages = torch.randn(11, generator=generator, dtype=torch.float64)
    new.requires_grad_(True)
    surrogate = clipped_surrogate(new, old, advantages, 0.2, 0.2)
    (wanted,) = torch.autograd.grad((old.exp() * surrogate).sum(), new, retain_graph=True)
    weights = importance_weights(old, behaviour, math.inf)
    (found,) = torch.autograd.grad((behaviour.exp() * weights * surrogate).sum(), new)
    torch.testing.assert_close(found, wanted)


def test_importance_weights_carry_no_gradient_and_stay_finite() -> None:
    old = torch.tensor([500.0, -500.0], requires_grad=True)
    weights = importance_weights(old, torch.zeros(2, requires_grad=True), math.inf)
    assert torch.isfinite(weights).all() and not weights.requires_grad


@given(st.lists(st.tuples(st.floats(-15, 0), st.floats(-15, 0)), min_size=1, max_size=20))
def test_k3_is_never_negative_and_zero_at_equality(pairs: list[tuple[float, float]]) -> None:
    new, reference = (torch.tensor(x, dtype=torch.float32) for x in zip(*pairs, strict=True))
    assert (k3(new, reference) >= 0).all()
    assert (k3(new, new) == 0).all()


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_k3_is_unbiased_for_tokens_of_the_policy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.randn(2, 11, generator=generator).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * k3(policy, reference)).sum(), exact, rtol=1e-4, atol=1e-5)
    # and the mismatch measures KL(behaviour || learner), over tokens that the behaviour policy sampled
    torch.testing.assert_close((policy.exp() * mismatch_kl(reference, policy)).sum(), exact, rtol=1e-4, atol=1e-5)


def test_k3_pulls_towards_the_reference() -> None:
    new = torch.tensor([-1.0, -3.0], requires_grad=True)
    k3(new, torch.tensor([-2.0, -2.0])).sum().backward()
    assert new.grad is not None
    assert new.grad[0] > 0 > new.grad[1]


def test_mismatch_carries_no_gradient() -> None:
    assert not mismatch_kl(torch.zeros(2, requires_grad=True), torch.zeros(2)).requires_grad
