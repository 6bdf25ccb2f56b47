"""One pass of a model for the tokens of several sets of adapters.

Each set's tokens are a run of the pass's tokens. Attention, norms and activations run for all tokens at once; a matrix product
runs for all tokens or, with `same_bits`, run by run, since a library may add in another order for another number of rows.

Invariant: a token's output depends on its own sequence and its own adapters only; with `same_bits` it has the bits that it has in
a pass without the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyreme.config.trainer import LoraConfig
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, stage_rows
from polyreme_trainer.megatron.huggingface.lora_mapping import B, adapter_architecture
from polyreme_trainer.megatron.layers.lora import Adapters, Product, differentiable, without_collectives
from polyreme_trainer.megatron.mcore import ColumnParallelLinear, GPTModel, RowParallelLinear


@dataclass(frozen=True)
class AdapterRun:
    """A run of tokens with the same adapters; None: with none."""

    adapters: Adapters | None
    tokens: int


class SharedPass:
    """The layers of a rank's part of a model, whose products use the adapters of `parts`. It is made while none are attached.

    Args:
        module: the rank's part of the model, see `join_chunks`.
        arch: the model's architecture.
        here: this rank.
    """

    def __init__(self, module: GPTModel, arch: Architecture, here: Rank) -> None:
        self.parts: Sequence[AdapterRun] = ()
        self.same_bits = True
        for row, _ in stage_rows(adapter_architecture(arch, LoraConfig()), here):
            where, _, kind = row.param.rpartition(".")
            if kind == B:
                layer = module.get_submodule(where)
                layer._forward_impl = _SharedProduct(self, f"{where}.weight", layer)
        if module.config.recompute_granularity is not None:
            module.embedding.register_forward_hook(differentiable)

    def set(self, parts: Sequence[AdapterRun], same_bits: bool) -> None:
        """Sets the parts of the passes that follow, whose tokens are in this order; tokens after them have no adapters."""
        self.parts, self.same_bits = parts, same_bits

    def values(self, hidden: Tensor) -> Tensor:
        """fp32 [t], each token's value by its adapters' head; 0 without adapters. `hidden`: final hidden states, [t, hidden]."""
        sizes = [part.tokens for part in self.parts]
        rest = hidden.new_zeros(len(hidden) - sum(sizes))
        found = []
        for part, states in zip(self.parts, hidden[: sum(sizes)].split(sizes), strict=True):
            assert part.adapters is not None and part.adapters.head is not None
            found.append(torch.nn.functional.linear(states, part.adapters.head.weight).squeeze(1))
        return torch.cat([*found, rest]).float()


class _SharedProduct:
    """The product of one layer, in place of megatron-core's `_forward_impl`."""

    def __init__(self, shared: SharedPass, name: str, layer: ColumnParallelLinear | RowParallelLinear) -> None:
        self._shared, self._name, self._layer = shared, name, layer
        self._product: Product = layer._forward_impl

    def __call__(self, **arguments: object) -> Tensor:
        parts = self._shared.parts
        if not parts:
            return self._product(**arguments)
        local = without_collectives(self._layer, arguments)
        input: Tensor = local["input"]
        sizes = [part.tokens for part in parts]
        if rest := len(input) - sum(sizes):  # alignment, at the end
            sizes.append(rest)
        inputs = input.split(sizes)
        if self._shared.same_bits:
            outputs = [self._product(**{**local, "input": each}) for each in inputs]
        else:
            outputs = list(self._product(**local).split(sizes))
        for number, part in enumerate(parts):
            adapter = None if part.adapters is None else part.adapters.layers.get(self._name)
            if adapter is not None and part.tokens:
                outputs[number] = adapter.add_to(outputs[number], self._product, {**local, "input": inputs[number]})
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
