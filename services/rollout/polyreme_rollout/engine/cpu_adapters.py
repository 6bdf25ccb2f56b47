"""Adapters of requests on CPU: two matrix products for each adapter of a step.

vLLM's own CPU path copies an adapter for each token, and gives tokens without an adapter the one in the last slot. Invariant: a
token has the adapter of its request, and no other; without one, it has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from vllm.lora.punica_wrapper import punica_cpu

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping


def register_adapters() -> None:
    """Lets vLLM's model use `GroupedAdapters`, once per process; forked workers inherit it."""
    punica_cpu.PunicaWrapperCPU = GroupedAdapters  # type: ignore[misc]


@dataclass(frozen=True)
class AdapterRows:
    """The tokens of a step by adapter.

    Attributes:
        rows: numbers of tokens with an adapter, int64 [m], of which those of an adapter are adjacent; None: all, as they are.
        parts: vLLM's number of each adapter, its slot, and its part of `rows`.
    """

    rows: torch.Tensor | None
    parts: Sequence[tuple[int, int, slice]]

    @classmethod
    def of(cls, adapters: Sequence[int], slots: Sequence[int | None]) -> Self:
        """
        Args:
            adapters: the number of the adapter of each token; 0: none.
            slots: the number of the adapter in each slot.
        """
        numbers = np.asarray(adapters, dtype=np.int64)
        order = np.argsort(numbers, kind="stable")[int((numbers <= 0).sum()) :]
        found, counts = np.unique(numbers[order], return_counts=True)
        ends = np.cumsum(counts).tolist()
        parts = [
            (number, slots.index(number), slice(end - count, end))
            for number, count, end in zip(found.tolist(), counts.tolist(), ends, strict=True)
        ]
        return cls(None if np.array_equal(order, np.arange(len(numbers))) else torch.from_numpy(order), parts)


Matrices = tuple[torch.Tensor, torch.Tensor]
"""Of an adapter and a layer: A [ranks, in] of all projections fused into the layer, and B [out, ranks], block by block."""


class GroupedAdapters(punica_cpu.PunicaWrapperCPU):
    """vLLM's interface to the adapters of a step. Only linear layers have adapters (`engine_arguments`)."""

    polyreme_groups = AdapterRows(None, ())
    polyreme_packed: Mapping[int, dict[int, Matrices]] = {}
    """Matrices of each adapter with a slot, by the address of a layer's slots. A number stands for one adapter (`FIRST_LORA`)."""

    def update_metadata(self, mapping: "LoRAMapping", lora_index_to_id: list[int | None], *sizes: int, **options: object) -> None:
        self.polyreme_groups = AdapterRows.of(mapping.index_mapping, lora_index_to_id)
        self.polyreme_packed = {id: self.polyreme_packed.get(id, {}) for id in lora_index_to_id if id is not None}

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **options: object,
    ) -> None:
        """Adds scale x A^T B^T to the rows of each adapter.

        Args:
            y: of the base layer, [n, out]; changed in place.
            x: its input, [n, in].
            lora_a_stacked, lora_b_stacked: of each fused projection, [slots, 1, rank, in] and [slots, 1, part, rank].
            output_slices: the sizes of their parts of `out`.
        """
        groups = self.polyreme_groups
        if not groups.parts:
            return
        target, given = y[:, : sum(output_slices)], x if groups.rows is None else x.index_select(0, groups.rows)
        added = []
        for number, slot, part in groups.parts:
            layers, layer = self.polyreme_packed[number], lora_a_stacked[0].data_ptr()
            if layer not in layers:
                layers[layer] = pack(lora_a_stacked, lora_b_stacked, slot)
            a, b = layers[layer]
            if groups.rows is None:
                target[part].addmm_(given[part] @ a.t(), b.t(), alpha=scale)
            else:
                added.append(given[part] @ a.t() @ b.t())
        if groups.rows is not None:
            target.index_add_(0, groups.rows, torch.cat(added), alpha=scale)


def pack(a_stacked: Sequence[torch.Tensor], b_stacked: Sequence[torch.Tensor], slot: int) -> Matrices:
    """The matrices of a slot without its unused ranks."""
    used = [a[slot, 0].any(dim=1) for a in a_stacked]
    a = torch.cat([stacked[slot, 0][ranks] for stacked, ranks in zip(a_stacked, used, strict=True)])
    b = torch.block_diag(*(stacked[slot, 0][:, ranks] for stacked, ranks in zip(b_stacked, used, strict=True)))
    return a, b
