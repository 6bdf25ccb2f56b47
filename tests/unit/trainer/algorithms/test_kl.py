"""The estimators' values and gradients match their formulas, also beyond every limit; the controller matches worked numbers."""

import math

import numpy as np
import pytest
import torch

from polyreme_trainer.algorithms.kl import K3_LIMIT, adapt, estimate

DIFFERENCES = [-9.0, -2.0, -0.3, -1e-6, 0.0, 1e-6, 0.3, 2.0, 40.0]
VALUES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d if abs(d) > 1e-3 else d * d / 2 - d**3 / 6,
    "abs": abs,
}
SLOPES = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1 - math.exp(-d), "abs": lambda d: math.copysign(d != 0, d)}


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"])
def test_estimates_and_their_gradients(name: str) -> None:
    new = torch.tensor([d - 1.5 for d in DIFFERENCES], dtype=torch.float64, requires_grad=True)
    found = estimate(name, new, torch.full_like(new, -1.5).detach())  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(found.sum(), new)
    value = VALUES[name.removesuffix("+")]
    slope = SLOPES["k2" if name.endswith("+") else name]
    np.testing.assert_allclose(found.detach(), [value(d) for d in DIFFERENCES], rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(gradient, [slope(d) for d in DIFFERENCES], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"])
@pytest.mark.parametrize("distance", [30.0, 500.0])
def test_a_far_off_token_keeps_a_finite_gradient(name: str, distance: float) -> None:
    new = torch.tensor([-distance], requires_grad=True)
    found = estimate(name, new, torch.zeros(1))  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(found.sum(), new)
    assert torch.isfinite(found).all() and torch.isfinite(gradient).all()
    if name != "k1":
        assert gradient.item() < 0  # the loss falls when the token becomes more likely


def test_k3_is_continued_by_its_tangent() -> None:
    top = math.exp(K3_LIMIT)
    found = estimate("k3", torch.tensor([-K3_LIMIT - 2], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert found.item() == pytest.approx(3 * top - 1 - K3_LIMIT - 2, rel=1e-12)


def test_gradients_in_expectation() -> None:
    """Over tokens of the policy, the gradient of k1 is 0, and that of k2 and of every "+" is the gradient of KL(policy || reference)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(11, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    frozen = policy.detach().exp()
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)

    def expected(name: str) -> torch.Tensor:
        loss = (frozen * estimate(name, policy, reference)).sum()  # type: ignore[arg-type]
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    torch.testing.assert_close(expected("k1"), torch.zeros_like(exact))
    for name in ("k2", "k1+", "k3+", "abs+"):
        torch.testing.assert_close(expected(name), exact)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 64 / 640)),
        (60.0, 0.1 * (1 + 0.2 * 64 / 640)),  # bounded
        (0.0, 0.1 * (1 - 0.2 * 64 / 640)),
    ],
)
def test_the_controller(kl: float, expected: float) -> None:
    assert adapt(0.1, kl, target=6.0, horizon=640, samples=64) == pytest.approx(expected, rel=1e-12)
