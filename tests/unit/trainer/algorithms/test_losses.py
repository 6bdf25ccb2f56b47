"""Every loss compared with scalar formulas over Python numbers, value and gradient.

In a formula p is the log-probability that is differentiated and f its frozen copy, which a stop-gradient sees; gradients are
central differences in p alone.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from polyreme_trainer.algorithms import losses
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.losses import TokenLoss
from polyreme_trainer.algorithms.ratio import LOG_RATIO_LIMIT, bounded_exp
from support.token_batches import loss_inputs

RATIOS = [0.5, 0.99, 1.0, 1.01, 2.0, 50.0]
LOW, HIGH, DUAL, CAP = 0.2, 0.28, 3.0, 20.0
OLD = math.log(0.015)
"""Log-probability under the anchor, such that 50 times the probability is still a probability."""


def ppo(p: float, f: float, a: float) -> float:
    r = math.exp(p - OLD)
    return max(-a * r, -a * min(max(r, 1 - LOW), 1 + HIGH))


def dual_clip(p: float, f: float, a: float) -> float:
    return min(ppo(p, f, a), -a * DUAL) if a < 0 else ppo(p, f, a)


def cispo(p: float, f: float, a: float) -> float:
    return -min(max(math.exp(f - OLD), 1 - LOW), 1 + HIGH) * a * p


def sapo(p: float, f: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(p - OLD) - 1)))


def tv_mask(p: float, f: float, a: float) -> float:
    difference = math.exp(f) - math.exp(OLD)
    if (a > 0 and difference > HIGH) or (a < 0 and difference < -LOW):
        return 0.0
    return -min(math.exp(f - OLD), CAP) * a * p


def reinforce(p: float, f: float, a: float) -> float:
    return -a * p


OURS: dict[str, tuple[Callable[[float, float, float], float], Callable[[LossInputs, Tensor], TokenLoss]]] = {
    "ppo": (ppo, partial(losses.clip, low=LOW, high=HIGH)),
    "dual clip": (dual_clip, partial(losses.clip, low=LOW, high=HIGH, dual=DUAL)),
    "cispo": (cispo, partial(losses.cispo, low=LOW, high=HIGH)),
    "sapo": (sapo, partial(losses.sapo, tau_positive=1.0, tau_negative=1.05)),
    "tv mask": (tv_mask, partial(losses.tv_mask, low=LOW, high=HIGH, cap=CAP)),
    "policy gradient": (reinforce, losses.policy_gradient),
}


def tokens(new: Tensor, a: Tensor) -> LossInputs:
    """Tokens of as many sequences with these log-probabilities and advantages."""
    return loss_inputs(0, [1] * len(new), logprobs=new, advantages=a)


def slope(formula: Callable[[float, float, float], float], p: float, a: float) -> float:
    h = 1e-6
    return (formula(p + h, p, a) - formula(p - h, p, a)) / (2 * h)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OURS)
def test_token_losses_and_their_gradients(name: str, dtype: torch.dtype) -> None:
    formula, loss = OURS[name]
    cases = [(OLD + math.log(r), a) for r in RATIOS for a in (1.5, -0.7, 0.0)]
    new = torch.tensor([p for p, _ in cases], dtype=dtype, requires_grad=True)
    old, a = torch.full_like(new, OLD).detach(), torch.tensor([a for _, a in cases], dtype=dtype)
    found = loss(tokens(new, a), old).loss
    (gradient,) = torch.autograd.grad(found.sum(), new)
    rtol = 1e-9 if dtype is torch.float64 else 2e-5
    np.testing.assert_allclose(found.detach(), [formula(p, p, a) for p, a in cases], rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(gradient, [slope(formula, p, a) for p, a in cases], rtol=max(rtol, 1e-6), atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped", "dual"),
    [
        (1.0, 2.0, -2.0, -2.0, False, False),
        (1.1, 1.0, -1.1, -1.1, False, False),
        (1.5, 1.0, -1.28, 0.0, True, False),  # clipped above: no further gradient
        (1.5, -1.0, 1.5, 1.5, False, False),  # a bad token that became more likely: outside the bounds, but not clipped
        (0.5, 1.0, -0.5, -0.5, False, False),  # a good token that became less likely: not clipped
        (0.5, -1.0, 0.8, 0.0, True, False),  # clipped below
        (50.0, -1.0, 3.0, 0.0, False, True),  # a bad token that became much more likely: bounded by the dual clip
        (50.0, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_the_clip_acts_on_the_right_side(
    ratio: float, advantage: float, loss: float, slope: float, clipped: bool, dual: bool
) -> None:
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    inputs = tokens(log_ratio, torch.tensor([advantage], dtype=torch.float64))
    found = losses.clip(inputs, torch.zeros_like(log_ratio), LOW, HIGH, DUAL)
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_ratio)
    assert [found.loss.item(), gradient.item()] == pytest.approx([loss, slope])
    assert (found.flags["clip_fraction"].item(), found.flags["dual_clip_fraction"].item()) == (clipped, dual)


def test_flags_of_the_other_losses() -> None:
    ratio, a = torch.tensor([0.5, 1.0, 2.0, 0.5, 2.0, 2.0]).log(), torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.0])
    inputs, anchor = tokens(ratio, a), torch.zeros_like(ratio)
    flags = losses.cispo(inputs, anchor, LOW, HIGH).flags["clip_fraction"]
    assert flags.tolist() == [True, False, True, True, True, False]
    probability, sampled = torch.tensor([0.9, 0.9, 0.1, 0.1, 0.5]).log(), torch.tensor([0.5] * 5).log()
    masked = losses.tv_mask(tokens(probability, torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])), sampled, LOW, HIGH, CAP)
    assert masked.flags["clip_fraction"].tolist() == [True, False, False, True, False]
    assert losses.sapo(inputs, anchor, 1.0, 1.05).flags == losses.policy_gradient(inputs, anchor).flags == {}


SIZES = [3, 1, 5, 2]


def by_sequence(values: list[float]) -> list[list[int]]:
    starts = np.concatenate([[0], np.cumsum(SIZES)])
    assert starts[-1] == len(values)
    return [list(range(a, b)) for a, b in itertools.pairwise(starts)]


def naive_gspo(p: list[float], f: list[float], old: list[float], a: list[float]) -> float:
    total = 0.0
    for tokens in by_sequence(p):
        s = math.exp(sum(p[t] - old[t] for t in tokens) / len(tokens))
        clipped = min(max(s, 1 - 0.1), 1 + 0.15)
        total += max(-a[tokens[0]] * s, -a[tokens[0]] * clipped) / len(SIZES)
    return total


def naive_gmpo(p: list[float], f: list[float], old: list[float], a: list[float]) -> float:
    total = 0.0
    for tokens in by_sequence(p):
        logs = []
        for t in tokens:
            x = p[t] - old[t]
            logs.append(min(x, 0.4) if a[t] > 0 else max(x, -0.3))
        total += -a[tokens[0]] * math.exp(sum(logs) / len(logs)) / len(SIZES)
    return total


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_sequence_losses_and_their_gradients(name: str, seed: int) -> None:
    check_sequence_loss(name, loss_inputs(seed, SIZES))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_sequence_losses_at_one_ratio(name: str, ratio: float, sign: float) -> None:
    inputs = loss_inputs(0, SIZES)
    new = (inputs.old + math.log(ratio)).requires_grad_(True)
    check_sequence_loss(name, replace(inputs, logprobs=new, advantages=sign * inputs.advantages.abs()))


def check_sequence_loss(name: str, inputs: LossInputs) -> None:
    """Value and gradient against the loops and their central differences."""
    if name == "gspo":
        naive, found = naive_gspo, losses.clip(inputs, inputs.old, 0.1, 0.15, ratio="sequence")
    else:
        naive, found = naive_gmpo, losses.geometric_mean(inputs, inputs.old, 0.3, 0.4)
    weight = torch.tensor([1 / (len(SIZES) * SIZES[i]) for i in inputs.sequence], dtype=torch.float64)
    total = (weight * found.loss).sum()
    (gradient,) = torch.autograd.grad(total, inputs.logprobs)
    p, old, a = inputs.logprobs.tolist(), inputs.old.tolist(), inputs.advantages.tolist()
    assert total.item() == pytest.approx(naive(p, p, old, a), rel=1e-9)
    h = 1e-6
    for t in range(len(p)):
        up, down = [*p[:t], p[t] + h, *p[t + 1 :]], [*p[:t], p[t] - h, *p[t + 1 :]]
        assert gradient[t].item() == pytest.approx((naive(up, p, old, a) - naive(down, p, old, a)) / (2 * h), rel=1e-5, abs=1e-8)


def test_at_ratio_one_all_losses_have_the_same_gradient() -> None:
    inputs = loss_inputs(0, SIZES)
    new, a = inputs.logprobs, inputs.advantages
    old = new.detach()
    found = {name: loss(inputs, old) for name, (_, loss) in OURS.items()}
    found["gspo"] = losses.clip(inputs, old, 3e-4, 4e-4, ratio="sequence")
    found["gmpo"] = losses.geometric_mean(inputs, old, 0.4, 0.4)
    weight = torch.tensor([1 / (len(SIZES) * SIZES[i]) for i in inputs.sequence], dtype=torch.float64)
    for name, loss in found.items():
        (gradient,) = torch.autograd.grad((weight * loss.loss).sum(), new, retain_graph=True)
        torch.testing.assert_close(gradient, -weight * a, msg=name)


@pytest.mark.parametrize("loss", [loss for _, loss in OURS.values()], ids=OURS)
def test_no_advantage_no_gradient(loss: Callable[[LossInputs, Tensor], TokenLoss]) -> None:
    new = torch.tensor([-0.1, -2.0, -30.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(tokens(new, torch.zeros(3)), torch.tensor([-3.0, -2.0, -1.0])).loss.sum(), new)
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", OURS)
def test_far_off_ratios_stay_finite(name: str) -> None:
    new = torch.tensor([500.0, -500.0, 500.0, -500.0], requires_grad=True)
    loss = OURS[name][1](tokens(new, torch.tensor([-1.0, 1.0, 1.0, -1.0])), torch.zeros(4)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()


def test_the_bounded_exponential_is_exact_then_tangent() -> None:
    x = torch.tensor([-800.0, -1.0, 0.0, LOG_RATIO_LIMIT, LOG_RATIO_LIMIT + 3], dtype=torch.float64, requires_grad=True)
    found = bounded_exp(x)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    top = math.exp(LOG_RATIO_LIMIT)
    np.testing.assert_allclose(found.detach(), [0, math.exp(-1), 1, top, 4 * top], rtol=1e-12)
    np.testing.assert_allclose(gradient[[0, 1, 2, 4]], [0, math.exp(-1), 1, top], rtol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_and_its_gradient(clip: float | None) -> None:
    cases = [(v, old, g) for v in (-1.0, 0.1, 0.9) for old in (-0.8, 0.0, 1.0) for g in (-2.0, 0.05, 2.0)]

    def naive(v: float, old: float, g: float) -> float:
        free = (v - g) ** 2
        return free / 2 if clip is None else max(free, (min(max(v, old - clip), old + clip) - g) ** 2) / 2

    new = torch.tensor([v for v, _, _ in cases], dtype=torch.float64, requires_grad=True)
    old, target = (torch.tensor([case[i] for case in cases], dtype=torch.float64) for i in (1, 2))
    found = losses.value_loss(new, old, target, clip)
    (gradient,) = torch.autograd.grad(found.loss.sum(), new)
    np.testing.assert_allclose(found.loss.detach(), [naive(*case) for case in cases], rtol=1e-12)
    h = 1e-6
    slopes = [(naive(v + h, o, g) - naive(v - h, o, g)) / (2 * h) for v, o, g in cases]
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-9)
    if clip is None:
        assert found.flags == {}
    else:
        assert found.flags["value_clip_fraction"].tolist() == [naive(*case) > (case[0] - case[2]) ** 2 / 2 for case in cases]
