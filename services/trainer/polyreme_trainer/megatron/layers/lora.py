"""Low-rank adapters (LoRA, Hu et al. 2021) inside megatron-core's parallel linear layers: x W' + scale (x A') B', with W frozen.

The adapter joins the layer's matrix product, before bias, reduction over tensor ranks and any norm that follows, so the same code
serves both model specs and sequence parallelism. It runs on the layer's own kernel. A fused layer (queries, keys and values; gate
and up) has an A for each of its projections, as Hugging Face and PEFT separate them.

Every tensor rank computes with its part of A or of B. The other one of the two is whole on every rank, and each rank gets only a
part of its gradient. The parts are summed once per optimizer step, which exchanges less than a sum for each micro-batch.

Invariant: without an optimizer step B is zero, and a model with new adapters is the model without them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import xxhash
from torch import Tensor

from polyreme.config.trainer import LoraConfig
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_files import LazyTensors
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, hf_shapes, param_shapes, rank_slices, stage_rows
from polyreme_trainer.megatron.huggingface.lora_mapping import LORA_A, A, B, adapter_architecture, projection_of
from polyreme_trainer.megatron.mcore import (
    ColumnParallelLinear,
    GPTModel,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
)

Product = Callable[..., Tensor]
"""A layer's matrix product, as megatron-core's `_forward_impl`."""


class Adapter:
    """The adapter of one parallel layer. While it is attached, it takes the place of the layer's matrix product.

    Args:
        layer: megatron-core's layer with the parameter `weight`.
        a, b: the trained parameters.
        owner: [rows of the weight, projections], 1 where the row belongs to the projection of that A; None: all rows to one.
        scale: the factor of the adapter's output.
    """

    def __init__(
        self,
        layer: ColumnParallelLinear | RowParallelLinear,
        a: torch.nn.Parameter,
        b: torch.nn.Parameter,
        owner: Tensor | None,
        scale: float,
    ) -> None:
        self.layer, self.a, self.b, self.owner, self.scale, self.on = layer, a, b, owner, scale, True
        self._product: Product = layer._forward_impl

    def __call__(self, **arguments: object) -> Tensor:
        """The layer's matrix product with the adapter's, from the arguments of megatron-core's `_forward_impl`."""
        if not self.on:
            return self._product(**arguments)
        local = without_collectives(self.layer, arguments)
        return self.add_to(self._product(**local), self._product, local)

    def add_to(self, output: Tensor, product: Product, local: Mapping[str, object]) -> Tensor:
        """The layer's output with the adapter's. `product` computes that from `local`, the arguments of the layer's product."""
        inner = product(**{**local, "bias": None, "weight": self.a})
        outer = product(**{**local, "bias": None, "weight": self.wide_b(), "input": self.scale * inner})  # inner is small
        return output + outer

    def attach(self) -> None:
        """Gives the layer the parameters `lora_a` and `lora_b`, and the product with them."""
        self.layer.register_parameter(A, self.a)
        self.layer.register_parameter(B, self.b)
        self.layer._forward_impl = self

    def detach(self) -> None:
        """Gives the layer its matrix product back, without A and B."""
        self.layer._forward_impl = self._product
        for name in (A, B):
            delattr(self.layer, name)

    def wide_b(self) -> Tensor:
        """B as one matrix for the stacked A: [rows, projections * rank], 0 where row and column are of different projections."""
        return self.b if self.owner is None else (self.owner.unsqueeze(2) * self.b.unsqueeze(1)).flatten(1)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """W + scale B A, computed in float32 and rounded to the weight's dtype."""
        weight = self.layer.weight
        return weight.float().addmm(self.wide_b().float(), self.a.float(), alpha=self.scale).to(weight.dtype)


def without_collectives(layer: ColumnParallelLinear | RowParallelLinear, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a layer's product with the tensor ranks' collectives already done. Several products that read this one
    input have their gradients of it summed over the ranks at once."""
    input = arguments["input"]
    if arguments.get("sequence_parallel", False):
        input = gather_from_sequence_parallel_region(input, group=layer.tp_group)
    elif arguments["allreduce_dgrad"]:
        input = copy_to_tensor_model_parallel_region(input, group=layer.tp_group)
    return {**arguments, "input": input, "allreduce_dgrad": False, "sequence_parallel": False}


class LentHead:
    """A value head in a language model's output layer, whose own weight is set aside while the head is attached.

    Args:
        layer: the output layer.
        weight: the trained weight, [1, hidden].
    """

    def __init__(self, layer: ColumnParallelLinear, weight: torch.nn.Parameter) -> None:
        self._layer, self.weight = layer, weight
        self._own: torch.nn.Parameter | None = layer.weight  # None: the embedding's

    def attach(self) -> None:
        self._put(self.weight)

    def detach(self) -> None:
        self._put(self._own)

    def _put(self, weight: torch.nn.Parameter | None) -> None:
        del self._layer.weight  # a tied layer has it as a plain attribute, beside which there can be no parameter
        self._layer.register_parameter("weight", weight)


class Adapters:
    """The adapters of this rank's shard of a model. All other parameters are frozen, except for a value head.

    Args:
        module: the rank's part of the model, see `join_chunks`.
        arch: the architecture of the model; with a value head, for which a language model lends its output layer.
        here: this rank.
        lora: the section of the configuration. Raises ConfigError for targets that the model does not have.
        seed: the seed of every A. The A are the same on every layout.

    Attributes:
        arch: the mapping table of the trained parameters.
        params: the trained parameters by name.
        head: the value head in a language model's output layer, on the rank that has that layer; else None.
    """

    def __init__(self, module: GPTModel, arch: Architecture, here: Rank, lora: LoraConfig, seed: int) -> None:
        self.lora, self.arch = lora, adapter_architecture(arch, lora)
        self.layers: dict[str, Adapter] = {}
        self.head: LentHead | None = None
        self._partial: dict[int, torch.nn.Parameter] = {}
        module.requires_grad_(False)
        shapes, a = param_shapes(self.arch, here), dict[str, torch.nn.Parameter]()
        for row, _ in stage_rows(self.arch, here):
            where, _, kind = row.param.rpartition(".")
            layer = module.get_submodule(where)
            if kind not in (A, B):  # the value head
                if isinstance(layer, ColumnParallelLinear):
                    zeros = next(module.parameters()).new_zeros(shapes[row.param], dtype=layer.config.params_dtype)
                    self.head = LentHead(layer, torch.nn.Parameter(zeros))
                else:
                    layer.weight.requires_grad_(True)
                continue
            made = torch.nn.Parameter(layer.weight.new_zeros(shapes[row.param]))
            if row.share == "all" and here.tp > 1:
                self._partial[id(made)] = made
            if kind == A:
                a[where] = made
            else:
                self.layers[f"{where}.weight"] = Adapter(layer, a[where], made, self._owner(where, layer, here), lora.scale)
        self._embedding = module.embedding if here.pp_rank == 0 and module.config.recompute_granularity is not None else None
        self.attach()
        self.params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        self._start(here, seed)

    def attach(self) -> None:
        """Gives the layers the adapters."""
        for adapter in self.layers.values():
            adapter.attach()
        if self.head is not None:
            self.head.attach()
        self._hook = None if self._embedding is None else self._embedding.register_forward_hook(differentiable)

    def detach(self) -> None:
        """Makes the layers what they were without the adapters, which keep their values."""
        for adapter in self.layers.values():
            adapter.detach()
        if self.head is not None:
            self.head.detach()
        if self._hook is not None:
            self._hook.remove()

    def _owner(self, where: str, layer: ColumnParallelLinear | RowParallelLinear, here: Rank) -> Tensor | None:
        """Which projection's A each row of a layer's weight uses, see `Adapter`."""
        pieces = [piece for piece in rank_slices(self.arch, here) if piece.param.rpartition(".")[0] == where]
        places = {
            projection_of(piece.hf_name): piece.param_index[0].start // self.lora.rank
            for piece in pieces
            if piece.param.endswith(A)
        }
        owner = layer.weight.new_zeros(layer.weight.shape[0], len(places))
        for piece in pieces:
            if piece.param.endswith(B):
                owner[piece.param_index[0], places[projection_of(piece.hf_name)]] = 1
        return None if owner.shape[1] == 1 and bool(owner.all()) else owner

    @torch.no_grad()
    def _start(self, here: Rank, seed: int) -> None:
        """Draws every A as PEFT does, uniformly within 1 / sqrt(in) (`kaiming_uniform_` with a = sqrt(5)). Every B is zero."""
        shapes = hf_shapes(self.arch)
        for piece in rank_slices(self.arch, here):
            if piece.hf_name.endswith(LORA_A):
                generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {piece.hf_name}".encode()) >> 1)
                bound = 1 / math.sqrt(shapes[piece.hf_name][1])
                whole = torch.empty(shapes[piece.hf_name]).uniform_(-bound, bound, generator=generator)
                self.params[piece.param][piece.param_index].copy_(whole[piece.hf_index])

    def merge(self, params: Mapping[str, Tensor]) -> LazyTensors:
        """The model's weights with the adapters added, computed at access. `params`: the model's own parameters."""
        newest = lru_cache(maxsize=1)(lambda name: self.layers[name].merged())  # a parameter has several slices
        return LazyTensors(params, lambda name: newest(name) if name in self.layers else params[name].detach())

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within the block, the adapters are switched off."""
        for adapter in self.layers.values():
            adapter.on = False
        try:
            yield
        finally:
            for adapter in self.layers.values():
                adapter.on = True

    def is_partial(self, param: Tensor) -> bool:
        """Whether each tensor rank has a part of a trained parameter's gradient, see `sum_gradients`."""
        return id(param) in self._partial

    def sum_gradients(self) -> None:
        """Sums the gradients of which each tensor rank has a part. Collective over them; called once per optimizer step."""
        if not self._partial:
            return
        gradients = [param.main_grad for param in self._partial.values()]  # type: ignore[attr-defined]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat, group=parallel_state.get_tensor_model_parallel_group())
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def differentiable(_module: GPTModel, _arguments: object, embedded: Tensor) -> Tensor:
    """Layers are recomputed only where their input has a gradient, and the output of a frozen embedding has none."""
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded
