"""The losses of the training service against the formulas written plainly, values and gradients."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from polyreme_trainer.algorithms.service_losses import LOSSES
from polyreme_trainer.service.losses import SPECS

LOW, HIGH, BETA = 0.7, 1.4, 0.3
OPTIONS = {
    **{"clip_low_threshold": LOW, "clip_high_threshold": HIGH, "beta": BETA, "low": 0.3, "high": 0.2, "dual": 1.5, "cap": 2.0},
    **{"tau_positive": 1.0, "tau_negative": 1.5, "label_smoothing": 0.1, "gamma": 0.5, "value_clip": 0.5},
}
SEQUENCES = torch.arange(4).repeat_interleave(16)


def clipped(r: Tensor, a: Tensor) -> Tensor:
    """-min(r A, clip(r) A), by the sign of A and by which side of the bounds r is on."""
    beyond = (a > 0 and r > HIGH) or (a < 0 and r < LOW)
    return -torch.tensor(HIGH if r > 1 else LOW, dtype=r.dtype) * a if beyond else -r * a


def token(name: str, p: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """The loss of one token."""
    r = torch.exp(p - q)
    bounded = min(max(float(r.detach()), LOW), HIGH)
    if name in ("cross_entropy", "reinforce"):
        return -a * p
    if name == "importance_sampling":
        return -r * a
    if name == "ppo":
        return clipped(r, a)
    if name == "cispo":
        return -bounded * a * p
    if name == "dual_clip":
        bound = -OPTIONS["dual"] * a
        return bound if a < 0 and clipped(r, a) > bound else clipped(r, a)
    if name == "sapo":
        tau = OPTIONS["tau_positive"] if a > 0 else OPTIONS["tau_negative"]
        return -4 / tau * a / (1 + torch.exp(-tau * (r - 1)))
    if name == "dppo_tv":
        rise = float(torch.exp(p.detach()) - torch.exp(q))
        masked = rise > OPTIONS["high"] if a > 0 else -rise > OPTIONS["low"]
        return p * 0 if masked else -min(float(r.detach()), OPTIONS["cap"]) * a * p
    if name == "value":
        return (a != 0) * max((p - a) ** 2, (min(max(p, q - 0.5), q + 0.5) - a) ** 2) / 2
    assert name == "dro"
    return -(a * p - BETA / 2 * (p - q) ** 2)


def sequence(name: str, p: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """The loss of one sequence; its tokens with A = 0 are padding."""
    p, q, a = p[a != 0], q[a != 0], a[a != 0]
    if name == "gspo":  # the ratio of the sequence, with the gradient of each token's
        ratio = math.exp(float((p - q).mean().detach()))
        return sum((clipped(ratio * torch.exp(x - x.detach()), y) for x, y in zip(p, a, strict=True)), p.new_zeros(()))
    signs = torch.sign(a)
    bounded = [s * torch.minimum(s * x, s * x.clamp(-OPTIONS["low"], OPTIONS["high"])) for s, x in zip(signs, p - q, strict=True)]
    return (-a * torch.exp(torch.stack(bounded).mean())).sum()


def pair(name: str, p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """The loss of a chosen and a rejected sequence, one after the other."""
    better, worse = (w * (p - q))[:16].sum(), (w * (p - q))[16:].sum()
    mean, other = (w * p)[:16].sum() / w[:16].sum(), (w * p)[16:].sum() / w[16:].sum()
    if name == "dpo":
        h = BETA * (better - worse)
        return -(1 - OPTIONS["label_smoothing"]) * logsigmoid(h) - OPTIONS["label_smoothing"] * logsigmoid(-h)
    if name == "ipo":
        return (better - worse - 1 / (2 * BETA)) ** 2
    if name == "simpo":
        return -logsigmoid(BETA * (mean - other) - OPTIONS["gamma"])
    odds = [x - torch.log1p(-torch.exp(x)) for x in (mean, other)]
    return -mean - BETA * logsigmoid(odds[0] - odds[1])


def plain(name: str, p: Tensor, q: Tensor, a: Tensor) -> Tensor:
    if SPECS[name].together == 2:
        parts = [pair(name, p[i : i + 32], q[i : i + 32], a[i : i + 32]) for i in (0, 32)]
    elif name in ("gspo", "gmpo"):
        parts = [sequence(name, p[i : i + 16], q[i : i + 16], a[i : i + 16]) for i in range(0, 64, 16)]
    else:
        parts = [token(name, p[i], q[i], a[i]) for i in range(64)]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_value_and_gradient_are_those_of_the_formula(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    given, q = (-torch.rand(64, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    a = torch.randn(64, generator=generator, dtype=torch.float64)
    a[::8] = 0
    spec, p, wanted = SPECS[name], given.clone().requires_grad_(), given.clone().requires_grad_()
    a = a.abs() if spec.together == 2 else a
    inputs = {"weights": a, "logprobs": q, "advantages": a, "mask": (a != 0).double(), "reference_logprobs": q}
    inputs |= {"returns": a, "values": q}
    named, chosen = {each: inputs[each] for each in spec.inputs}, {each: OPTIONS[each] for each in spec.options}
    total, expected = LOSSES[name](p, named, chosen, SEQUENCES).sum(), plain(name, wanted, q, a)
    total.backward()
    expected.backward()
    torch.testing.assert_close(total, expected)
    assert p.grad is not None and wanted.grad is not None
    torch.testing.assert_close(p.grad, wanted.grad)
    assert p.grad.count_nonzero() > 20


def test_each_loss_has_a_formula() -> None:
    assert SPECS.keys() == LOSSES.keys()


def test_the_bounds_of_ppo_are_those_of_the_ratio() -> None:
    assert SPECS["ppo"].options == SPECS["cispo"].options == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
