"""The interface of a model spec: the layers and kernels of a model on one kind of device.

Invariant: all specs compute the same function of the same parameters, with the same names; only the kernels differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from polyreme_trainer.megatron.huggingface.families.base import ModelFamily
from polyreme_trainer.megatron.mcore import TransformerBlockSubmodules, TransformerConfig


class AutogradContext(Protocol):
    """What `torch.autograd.Function` hands from its forward to its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors as `saved_tensors`."""


class Linear(Protocol):
    """The matrix product of a parallel layer."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, sum_input_grads: bool
    ) -> Tensor:
        """x @ weight.T + bias.

        Args:
            x: [..., in]. weight: [out, in]. bias: [out].
            group: tensor-parallel process group.
            sum_input_grads: whether to sum the gradient of `x` over the group, since each rank has a part of the output features.
        """


def with_bias(linear: type[torch.nn.Module], family: ModelFamily, name: str) -> type[torch.nn.Module]:
    """The class of a parallel layer; where the family has a bias in the linear layer `name`, one that adds a bias to its output.

    megatron-core's configuration has a bias in all linear layers or in none, and leaves its addition to the caller.
    """

    class Biased(linear):  # type: ignore[misc, valid-type]
        def __init__(self, input_size: int, output_size: int, **options: object) -> None:
            super().__init__(input_size, output_size, **{**options, "bias": True, "skip_bias_add": False})

    return Biased if family.has_bias(name) else linear


@dataclass(frozen=True)
class ModelSpec:
    """One way to build and run a model.

    Attributes:
        block: (config, family, whether each layer of this stage has experts) -> the modules of megatron-core's transformer block.
        linear: the matrix product of the output layer.
        options: fields of megatron-core's TransformerConfig that `block` requires.
    """

    block: Callable[[TransformerConfig, ModelFamily, Sequence[bool]], TransformerBlockSubmodules]
    linear: Linear
    options: Mapping[str, object] = field(default_factory=dict)
