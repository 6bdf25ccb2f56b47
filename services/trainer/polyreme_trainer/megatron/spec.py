"""What a model is built from and how it runs on one kind of device.

Invariant: all specs compute the same function of the same parameters, under the same names; they differ in kernels only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from polyreme_trainer.megatron.mcore import GPTModel, TransformerBlockSubmodules, TransformerConfig


class Linear(Protocol):
    """The matrix product of a parallel layer."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any, sum_input_grads: bool) -> Tensor:
        """x @ weight.T + bias.

        Args:
            x: [..., in]. weight: [out, in]. bias: [out].
            group: tensor-parallel process group.
            sum_input_grads: each rank holds some of the output features, so the gradient of `x` is summed over the group.
        """
        ...


@dataclass(frozen=True)
class ModelSpec:
    """One way to build and run a model.

    Attributes:
        block: (config, number of layers of this stage) -> the modules of megatron-core's transformer block.
        forward: (module, token ids [b, s], rotary angles fp32 [s, head_dim / 2]) -> final hidden states [b * s, hidden].
        linear: the product of the output layer.
        options: fields of megatron-core's TransformerConfig that go with `block`.
    """

    block: Callable[[TransformerConfig, int], TransformerBlockSubmodules]
    forward: Callable[[GPTModel, Tensor, Tensor], Tensor]
    linear: Linear
    options: Mapping[str, Any] = field(default_factory=dict)
