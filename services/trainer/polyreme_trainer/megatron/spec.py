"""The interface of a model spec: the layers and kernels of a model on one kind of device.

Invariant: all specs compute the same function of the same parameters, with the same names; only the kernels differ.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from polyreme_trainer.megatron.families.base import ModelFamily
from polyreme_trainer.megatron.mcore import (
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    gather_from_sequence_parallel_region,
)


@dataclass(frozen=True)
class Angles:
    """Rotary angles of the positions, fp32 [s, head_dim / 2]: of the layers with full attention, and of those with a sliding window."""

    full: Tensor
    sliding: Tensor


class Linear(Protocol):
    """The matrix product of a parallel layer."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any, sum_input_grads: bool) -> Tensor:
        """x @ weight.T + bias.

        Args:
            x: [..., in]. weight: [out, in]. bias: [out].
            group: tensor-parallel process group.
            sum_input_grads: whether to sum the gradient of `x` over the group, because each rank holds a part of the output features.
        """
        ...


@dataclass(frozen=True)
class ModelSpec:
    """One way to build and run a model.

    Attributes:
        block: (config, family, number of layers of this stage) -> the modules of megatron-core's transformer block.
        forward: (module, token ids [b, s], rotary angles) -> final hidden states [b * s, hidden]; of a stage before the last, its output
            in megatron-core's shape. A stage after the first takes the input that the schedule has set instead of the ids.
        rows: entries per position [b, s, ...] -> the same in the order in which the layers see the positions, [b * s, ...].
        linear: the matrix product of the output layer.
        options: fields of megatron-core's TransformerConfig that `block` requires.
    """

    block: Callable[[TransformerConfig, ModelFamily, int], TransformerBlockSubmodules]
    forward: Callable[[GPTModel, Tensor, Angles], Tensor]
    rows: Callable[[Tensor], Tensor]
    linear: Linear
    options: Mapping[str, Any] = field(default_factory=dict)


def whole_sequence(module: GPTModel, hidden: Tensor) -> Tensor:
    """The hidden states of all positions. With sequence parallelism, each tensor rank has computed an equal run of them."""
    if not module.config.sequence_parallel:
        return hidden
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)  # all ranks have the whole gradient
