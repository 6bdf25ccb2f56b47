"""Adapters of requests on CPU: two matrix products for each adapter of a step.

vLLM's own CPU path copies an adapter for each token, and gives tokens without an adapter the one in the last slot. Invariant: a token has
the adapter of its request, and no other; without one, it has none.
"""

from collections.abc import Sequence
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
class Groups:
    """The tokens of a step by adapter.

    Attributes:
        rows: the numbers of the tokens with an adapter, int64 [m]; those of an adapter follow each other.
        parts: the slot of each adapter, and its part of `rows`.
    """

    rows: torch.Tensor
    parts: Sequence[tuple[int, slice]]

    @classmethod
    def of(cls, adapters: Sequence[int], slots: Sequence[int | None]) -> Self:
        """
        Args:
            adapters: vLLM's number of the adapter of each token; 0: none.
            slots: the number of the adapter in each slot.
        """
        numbers = np.asarray(adapters, dtype=np.int64)
        order = np.argsort(numbers, kind="stable")[int((numbers <= 0).sum()) :]
        found, counts = np.unique(numbers[order], return_counts=True)
        ends = np.cumsum(counts).tolist()
        parts = [
            (slots.index(number), slice(end - count, end))
            for number, count, end in zip(found.tolist(), counts.tolist(), ends, strict=True)
        ]
        return cls(torch.from_numpy(order), parts)


class GroupedAdapters(punica_cpu.PunicaWrapperCPU):
    """vLLM's interface to the adapters of a step. Only linear layers have adapters (`engine_arguments`)."""

    polyreme_groups: Groups | None = None

    def update_metadata(self, mapping: "LoRAMapping", lora_index_to_id: list[int | None], *sizes: int, **options: object) -> None:
        self.polyreme_groups = Groups.of(mapping.index_mapping, lora_index_to_id)

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
            lora_a_stacked, lora_b_stacked: of each projection that is fused into the layer, [slots, 1, rank, in] and [slots, 1, part, rank].
            output_slices: the sizes of their parts of `out`.
        """
        groups = self.polyreme_groups
        if groups is None or not groups.parts:
            return
        given, added = x.index_select(0, groups.rows), y.new_empty(len(groups.rows), sum(output_slices))
        for slot, part in groups.parts:
            first = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                torch.mm(given[part] @ a[slot, 0].t(), b[slot, 0].t(), out=added[part, first : first + width])
                first += width
        y[:, : added.shape[1]].index_add_(0, groups.rows, added, alpha=scale)
