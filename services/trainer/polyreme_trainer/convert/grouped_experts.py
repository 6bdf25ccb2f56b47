"""A rank's experts in two matrices, as megatron-core's GroupedMLP (also MindSpeed's) stores them, and as one matrix per expert.

`experts.weight1` has the numbers of [experts, hidden, 2 ffn], gate before up, in the shape [hidden, experts x 2 ffn].
`experts.weight2` has those of [experts, ffn, hidden], in the shape [experts x ffn, hidden]. So an expert's part is the transpose
of its linear layer's weight. Here `ffn` is the part of an expert's width that the rank has.

Invariant: the two forms have the same numbers, and splitting copies none.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from polyreme_trainer.megatron.huggingface.families.base import EXPERT

_PREFIX = EXPERT.removesuffix("local_experts.")
_GROUPED = re.compile(rf"(.*\.){re.escape(_PREFIX)}weight([12])")
_SINGLE = re.compile(rf"(.*\.){re.escape(EXPERT)}(\d+)\.linear_fc([12])\.weight")


def found_in(state: Iterable[str]) -> bool:
    """Whether there are matrices of several experts among the parameters."""
    return any(_GROUPED.fullmatch(name) for name in state)


def split(state: Mapping[str, Tensor], experts: int, ranks: int, hidden: int) -> dict[str, Tensor]:
    """The parameters with one weight for each expert and linear layer, as views.

    Args:
        experts, ranks: the number of experts of a layer, and that of the ranks that share them.
        hidden: the model's hidden size.

    Raises:
        ValueError: the experts do not divide over the ranks, or a matrix is not that of a rank's experts.
    """
    here, rest = divmod(experts, ranks)
    if rest:
        raise ValueError(f"{experts} experts over {ranks} ranks")
    single = dict[str, Tensor]()
    for name, tensor in state.items():
        found = _GROUPED.fullmatch(name)
        if found is None:
            single[name] = tensor
            continue
        layer, number = found.groups()
        if tensor.dim() != 2 or tensor.shape[int(number) - 1] != hidden or tensor.numel() % (here * hidden):
            raise ValueError(f"{name} of the shape {tuple(tensor.shape)}")
        shape = (here, hidden, -1) if number == "1" else (here, -1, hidden)
        for expert, part in enumerate(tensor.contiguous().view(shape)):
            single[f"{layer}{EXPERT}{expert}.linear_fc{number}.weight"] = part.t()
    return single


def joined(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters with a rank's experts of each layer in two matrices, the inverse of `split`."""
    result, parts = dict[str, Tensor](), dict[tuple[str, str], dict[int, Tensor]]()
    for name, tensor in state.items():
        if found := _SINGLE.fullmatch(name):
            layer, expert, number = found.groups()
            parts.setdefault((layer, number), {})[int(expert)] = tensor.t()
        else:
            result[name] = tensor
    for (layer, number), experts in parts.items():
        stack = torch.stack([experts[expert] for expert in sorted(experts)])
        shape = (stack.shape[1], -1) if number == "1" else (-1, stack.shape[2])
        result[f"{layer}{_PREFIX}weight{number}"] = stack.view(shape)
    return result
