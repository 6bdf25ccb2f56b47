"""The losses of the training service against the formulas written plainly, values and gradients."""

import pytest
import torch

from polyreme_trainer.algorithms.service_losses import LOSSES

LOW, HIGH, BETA = 0.7, 1.4, 0.3


def plain(name: str, p: torch.Tensor, q: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The sum over tokens, one token at a time."""
    total = torch.zeros((), dtype=p.dtype)
    for i in range(len(p)):
        r = torch.exp(p[i] - q[i])
        bounded = min(max(float(r.detach()), LOW), HIGH)
        if name == "cross_entropy":
            total = total - a[i] * p[i]
        elif name == "importance_sampling":
            total = total - r * a[i]
        elif name == "ppo":
            clipped = r if bounded == float(r.detach()) else torch.tensor(bounded, dtype=p.dtype)
            smaller = float(r.detach() * a[i]) <= float(clipped.detach() * a[i])
            total = total - (r * a[i] if smaller else clipped * a[i])
        elif name == "cispo":
            total = total - bounded * a[i] * p[i]
        else:
            total = total - (a[i] * p[i] - BETA / 2 * (p[i] - q[i]) ** 2)
    return total


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_value_and_gradient_are_those_of_the_formula(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    given, q, a = (torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(3))
    loss, p, wanted = LOSSES[name], given.clone().requires_grad_(), given.clone().requires_grad_()
    options = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH, "beta": BETA}
    inputs = {"weights": a, "logprobs": q, "advantages": a}
    total = loss.tokens(p, {each: inputs[each] for each in loss.inputs}, {each: options[each] for each in loss.options}).sum()
    expected = plain(name, wanted, q, a)
    total.backward()
    expected.backward()
    torch.testing.assert_close(total, expected)
    assert p.grad is not None and wanted.grad is not None
    torch.testing.assert_close(p.grad, wanted.grad)
    assert p.grad.count_nonzero() > 20


def test_the_bounds_of_ppo_are_those_of_the_ratio() -> None:
    assert LOSSES["ppo"].options == LOSSES["cispo"].options == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
