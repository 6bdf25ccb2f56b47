"""vLLM's C kernels of RMSNorm on CPU: where vLLM calls them, they compute what its torch operations compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyreme_rollout.engine.cpu_norms import PROVIDER, register_norms

pytestmark = pytest.mark.real  # it imports vLLM
EPSILON = 1e-6


@pytest.fixture(scope="module")
def operators() -> Any:
    register_norms()
    assert register_norms() == {"ir_op_priority": {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}}
    from vllm import ir

    return ir.ops


@pytest.mark.parametrize("shape", [(1, 8), (37, 96), (5, 3, 48), (0, 8)])
def test_the_kernels_equal_the_torch_operations(operators: Any, shape: tuple[int, ...]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape) * 9, torch.randn(shape[-1])
    native = operators.rms_norm.impls["native"].impl_fn(x, weight, EPSILON)
    fused, total = operators.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, EPSILON)
    with operators.rms_norm.set_priority([PROVIDER]), operators.fused_add_rms_norm.set_priority([PROVIDER]):
        assert operators.rms_norm.dispatch(x, weight, EPSILON).provider == PROVIDER
        assert operators.fused_add_rms_norm.dispatch(x, residual, weight, EPSILON).provider == PROVIDER
        torch.testing.assert_close(operators.rms_norm(x, weight, EPSILON), native, rtol=1e-5, atol=1e-6)
        outputs = operators.fused_add_rms_norm(x, residual, weight, EPSILON)
    torch.testing.assert_close(outputs, (fused, total), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda x: x.to(torch.bfloat16), {}),
        (lambda x: x.t().contiguous().t(), {}),
        (lambda x: x, {"variance_size": 4}),
        (lambda x: x, {"weight": None}),
    ],
    ids=["bf16", "not contiguous", "part of the row", "no weight"],
)
def test_other_inputs_keep_the_torch_operations(
    operators: Any, change: Callable[[torch.Tensor], torch.Tensor], options: dict[str, Any]
) -> None:
    x = change(torch.randn(6, 8))
    arguments = {"weight": torch.randn(8), "epsilon": EPSILON, **options}
    with operators.rms_norm.set_priority([PROVIDER]), operators.fused_add_rms_norm.set_priority([PROVIDER]):
        assert operators.rms_norm.dispatch(x, **arguments).provider == "native"
        assert operators.fused_add_rms_norm.dispatch(x, torch.randn(6, 8), **arguments).provider == "native"
        if x.dtype == torch.float32:
            other = torch.randn(8, 6).t()
            assert operators.fused_add_rms_norm.dispatch(torch.randn(6, 8), other, **arguments).provider == "native"
