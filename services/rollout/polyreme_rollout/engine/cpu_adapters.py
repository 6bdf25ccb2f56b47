"""Adapters of requests on CPU: two matrix products for each adapter of a step.

vLLM's own CPU path copies an adapter for each token, and gives tokens without an adapter the one in the last slot. Invariant: a token has
the adapter of its request, and no other; without one, it costs nothing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.lora.punica_wrapper import punica_cpu

Rows = slice | torch.Tensor
"""Some rows of a step's tokens: without gaps, or their numbers, int64."""


def register_adapters() -> None:
    """Lets vLLM's model use `GroupedAdapters`, once per process; forked workers inherit it."""
    punica_cpu.PunicaWrapperCPU = GroupedAdapters


def group_rows(adapters: Sequence[int], slots: Sequence[int | None]) -> list[tuple[int, Rows]]:
    """The slot of each adapter in a step, and its rows.

    Args:
        adapters: of each row, vLLM's number of its adapter; 0: none.
        slots: the number of the adapter in each slot.
    """
    numbers, groups = np.asarray(adapters, dtype=np.int64), list[tuple[int, Rows]]()
    for number in np.unique(numbers[numbers > 0]):
        rows = np.flatnonzero(numbers == number)
        first, last = int(rows[0]), int(rows[-1])
        whole = last - first + 1 == len(rows)
        groups.append((slots.index(int(number)), slice(first, last + 1) if whole else torch.from_numpy(rows)))
    return groups


class GroupedAdapters(punica_cpu.PunicaWrapperCPU):
    """vLLM's interface to the adapters of a step. Only linear layers have adapters (`engine_arguments`)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._groups: list[tuple[int, Rows]] = []

    def update_metadata(self, mapping: Any, lora_index_to_id: list[int | None], *sizes: int, **options: Any) -> None:
        self._groups = group_rows(mapping.index_mapping, lora_index_to_id)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **options: Any,
    ) -> None:
        """Adds scale x A^T B^T to the rows of each adapter.

        Args:
            y: of the base layer, [n, out]; changed in place.
            x: its input, [n, in].
            lora_a_stacked, lora_b_stacked: of each projection that is fused into the layer, [slots, 1, rank, in] and [slots, 1, part, rank].
            output_slices: the sizes of their parts of `out`.
        """
        for slot, rows in self._groups:
            given, first = x[rows], 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                part, inner = y[:, first : first + width], given @ a[slot, 0].t()
                if isinstance(rows, slice):
                    part[rows].addmm_(inner, b[slot, 0].t(), alpha=scale)
                else:
                    part.index_add_(0, rows, inner @ b[slot, 0].t(), alpha=scale)
                first += width
