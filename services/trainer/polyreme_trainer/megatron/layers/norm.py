"""The RMS norm of the model on accelerators; for both specs, a norm over all heads, and a row-parallel layer that ends in a norm.

Invariant: a zero-centred weight is added to 1 in fp32, as in transformers.
"""

import torch
from torch import Tensor

from polyreme_trainer.megatron.mcore import (
    ModuleSpec,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)


class TorchRmsNorm(torch.nn.Module):
    """An RMS norm with megatron-core's interface and torch's kernel. Weight [hidden_size]. With `layernorm_zero_centered_gamma`
    the factor is 1 + weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - ranks then sum its gradient
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()  # a view of keys would keep the queries and values, too, until the backward pass
        if not self.zero_centered:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # Sum and product are in fp32, as in transformers: bfloat16 has too few digits for 1 + weight.
        return torch.nn.functional.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class ProjectionNorm(torch.nn.Module):
    """An RMS norm over all heads of a projection together, with the interface of megatron-core's norms of single heads. Weight
    [heads of this rank x hidden_size].

    Tensor ranks divide the heads, and sum the squares over all of them.

    Args:
        hidden_size: the size of a head.
        heads: the heads of all tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int, **_: object) -> None:
        super().__init__()
        self.ranks, self.width, self.eps = config.tensor_model_parallel_size, heads * hidden_size, eps
        self.weight = torch.nn.Parameter(torch.ones(self.width // self.ranks, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, hidden_size]"""
        rows = x.flatten(-2).float()
        squares = rows.square().sum(-1, keepdim=True)
        if self.ranks > 1:
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = rows * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normed.to(x.dtype)).view_as(x)


def projection_norms(config: TransformerConfig) -> tuple[ModuleSpec, ModuleSpec]:
    """The norms of queries and of keys over all their heads."""
    counts = config.num_attention_heads, config.num_query_groups
    queries, keys = (ModuleSpec(module=ProjectionNorm, params={"heads": heads}) for heads in counts)
    return queries, keys


def ends_in_norm(linear: type[torch.nn.Module], norm: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A row-parallel layer whose output passes through a norm, `post_layernorm`, before the residual is added."""

    class Normed(linear):  # type: ignore[misc, valid-type]
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: object) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(x)
            return self.post_layernorm(output), bias

    return Normed
