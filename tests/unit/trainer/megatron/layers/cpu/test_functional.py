"""The fused parts of a layer compared with their textbook forms, values and gradients, in one process without a model."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from polyreme.config.trainer import OptimizerConfig
from polyreme_trainer.learner.learning_rate import learning_rate
from polyreme_trainer.megatron.layers.activation import ROWS, Gated
from polyreme_trainer.megatron.layers.cpu.linear import TOKENS, linear
from polyreme_trainer.megatron.layers.cpu.spec import rms_norm


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def test_rms_norm() -> None:
    x, weight, grad = leaf(3, 5, 8), leaf(8, seed=1), leaf(3, 5, 8, seed=2).detach()
    want = weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    got = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(got, want)
    for ours, theirs in zip(
        torch.autograd.grad(got, (x, weight), grad), torch.autograd.grad(want, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_where_the_reference_does(dtype: torch.dtype) -> None:
    """In bfloat16 the result equals that of transformers' LlamaRMSNorm bit by bit. Gradients equal the exact ones up to the dtype's
    rounding."""
    x, weight = leaf(64, 96, dtype=dtype), leaf(96, dtype=dtype, seed=1)
    reference = LlamaRMSNorm(96, eps=1e-6).to(dtype)
    reference.weight.data.copy_(weight.detach())
    got, want = rms_norm(x, weight, 1e-6), reference(x)
    if dtype is torch.bfloat16:
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want)
    grad = leaf(64, 96, dtype=dtype, seed=2).detach()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    truth = torch.autograd.grad(rms_norm(exact[0], exact[1], 1e-6), exact, grad.double())
    for mine, true in zip(torch.autograd.grad(got, (x, weight), grad), truth, strict=True):
        assert mine.dtype is dtype
        eps = max(1e-5, 2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(mine, true.to(dtype), rtol=eps, atol=eps)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (0, 6), (2 * ROWS + 3, 4)])
@pytest.mark.parametrize("is_silu", [True, False])
def test_gated_activations(shape: tuple[int, ...], is_silu: bool) -> None:
    x = leaf(*shape)
    gate, up = x.chunk(2, dim=-1)
    want = (torch.nn.functional.silu(gate) if is_silu else torch.nn.functional.gelu(gate, approximate="tanh")) * up
    got = Gated.apply(x, is_silu)
    torch.testing.assert_close(got, want)
    grad = leaf(*want.shape, seed=2).detach()
    torch.testing.assert_close(torch.autograd.grad(got, x, grad), torch.autograd.grad(want, x, grad))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("tokens", "width"), [(7, 12), (2 * TOKENS + 1, 80)])
def test_linear(tokens: int, width: int, with_bias: bool) -> None:
    x, weight = leaf(tokens, 1, width, dtype=torch.float32), leaf(70, width, dtype=torch.float32, seed=1)
    bias = leaf(70, dtype=torch.float32, seed=2) if with_bias else None
    grad = leaf(tokens, 1, 70, dtype=torch.float32, seed=3).detach()
    leaves = [x, weight] + ([bias] if bias is not None else [])
    got, want = linear(x, weight, bias, None, False), torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(got, want)
    for ours, theirs in zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * tokens**0.5)


def test_linear_of_a_frozen_weight_passes_the_gradient_on() -> None:
    x, weight = leaf(3, 4, dtype=torch.float32), leaf(5, 4, dtype=torch.float32, seed=1).detach()
    linear(x, weight, None, None, False).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 4))


@pytest.mark.parametrize("mkl", [True, False])
def test_weight_gradients_join_the_gradient_buffer(mkl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two micro-batches, the buffer and autograd's result have each addend once, with the matrix product of either processor
    vendor."""
    monkeypatch.setattr("polyreme_trainer.megatron.layers.cpu.linear._MKL", mkl)
    weight = leaf(4, 6, dtype=torch.float32)
    buffer = torch.zeros(4, 6)
    weight.main_grad = buffer  # type: ignore[attr-defined]
    want = torch.zeros(4, 6)
    for seed in (1, 2):
        x, grad = leaf(3, 5, 6, dtype=torch.float32, seed=seed), leaf(3, 5, 4, dtype=torch.float32, seed=seed + 2).detach()
        linear(x, weight, None, None, False).backward(grad)
        want += grad.flatten(0, 1).t() @ x.detach().flatten(0, 1)
    torch.testing.assert_close(buffer + (0 if weight.grad is None else weight.grad), want)


def test_an_empty_batch_has_no_gradient() -> None:
    weight, x = leaf(4, 6, dtype=torch.float32), leaf(0, 6, dtype=torch.float32)
    weight.main_grad = torch.zeros(4, 6)  # type: ignore[attr-defined]
    linear(x, weight, None, None, False).sum().backward()
    assert not weight.main_grad.any()  # type: ignore[attr-defined]
    assert weight.grad is None or not weight.grad.any()


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", {1: 0.5, 2: 1.0, 3: 1.0, 10: 1.0}),
        ("linear", {1: 0.5, 2: 1.0, 3: 1.0, 7: 0.55, 10: 0.2125}),
        ("cosine", {1: 0.5, 2: 1.0, 3: 1.0, 7: 0.55}),
    ],
)
def test_learning_rate(schedule: str, rates: dict[int, float]) -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, schedule=schedule, warmup=2)
    for iteration, rate in rates.items():
        assert learning_rate(config, iteration, 10) == pytest.approx(rate)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_schedule_begins_with_the_optimizers_first_step(schedule: str) -> None:
    """While only the critic is trained, the actor's warm-up waits, and its decay is that of the iterations that are left."""
    config = OptimizerConfig(lr=1.0, min_lr=0.1, schedule=schedule, warmup=2)
    assert [learning_rate(config, iteration, 10, skipped=4) for iteration in (1, 4)] == [0.0, 0.0]
    own = [learning_rate(config, iteration, 6) for iteration in range(1, 7)]
    assert [learning_rate(config, iteration, 10, skipped=4) for iteration in range(5, 11)] == own


def test_a_decay_leaves_no_iteration_without_a_rate() -> None:
    for schedule in ("linear", "cosine"):
        config = OptimizerConfig(lr=1.0, min_lr=0.0, schedule=schedule)
        assert learning_rate(config, 1, 1) == 1.0
        assert learning_rate(config, 10, 10) > 0
