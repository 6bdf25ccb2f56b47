"""RMSNorm on CPU by vLLM's own C kernels.

vLLM's CPU build has these kernels but registers them for GPUs only, and computes each norm by seven torch operations: a tenth of
the time that a small model needs for a token. Invariant: only fp32 is computed by them, where they differ from the torch
operations by rounding of the last bit; in bf16 they round elsewhere than transformers and the learner.
"""

import torch

PROVIDER = "polyreme_cpu"


def register_norms() -> dict[str, object]:
    """Registers the kernels with vLLM's operators, once per process; forked workers inherit them. Returns the engine arguments
    that prefer them."""
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_ir_kernels()
    if PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_supports)(_rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_supports_fused, inplace=True)(_fused_add_rms_norm)
    return {"ir_op_priority": {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}}


def _supports(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """The kernels read rows without gaps, and a weight."""
    fp32 = x.dtype == torch.float32 and weight is not None and weight.dtype == torch.float32
    return fp32 and variance_size is None and x.is_contiguous()


def _supports_fused(
    x: torch.Tensor, x_residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _supports(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype and x_residual.is_contiguous()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> torch.Tensor:
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


def _fused_add_rms_norm(
    x: torch.Tensor, x_residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrites both inputs, as vLLM allows."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
