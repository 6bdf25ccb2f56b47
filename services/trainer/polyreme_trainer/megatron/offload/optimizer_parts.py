"""An optimizer's moments and full-precision weights, in parts kept in the host's memory and moved to the device for their step.

AdamW computes each element from its own gradient and state, so stepping the parts one by one gives the same bits as one step.
Only one part is on the device at a time, so the largest part determines the peak of a step.

Invariant: outside of `step` and `visits`, no part is on the device.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from polyreme_trainer.megatron import mcore
from polyreme_trainer.megatron.offload import PART_BYTES
from polyreme_trainer.megatron.offload.fragments import Fragment
from polyreme_trainer.megatron.offload.host_memory import HostMemory
from polyreme_trainer.megatron.offload.offload import Movable


class OptimizerParts:
    """The parts of one optimizer.

    Args:
        fragments: all fragments that this rank steps.
        host: the object that moves the parts.
        part_bytes: see `cut`; None: PART_BYTES.
    """

    def __init__(self, fragments: Iterable[Fragment], host: HostMemory, part_bytes: int | None = None) -> None:
        self._host = host
        parts = cut(list(fragments), PART_BYTES if part_bytes is None else part_bytes)
        self._parts = [(part, self._movable(part)) for part in parts]
        self._part_of = {id(fragment): movable for part, movable in self._parts for fragment in part}
        for _ in self.visits():
            pass

    def _movable(self, part: Sequence[Fragment]) -> Movable:
        return self._host.movable(lambda: [tensor for fragment in part for tensor in fragment.state_tensors().values()])

    def visits(self) -> Iterator[Sequence[Fragment]]:
        """Yields every part while it is on the device."""
        for part, movable in self._parts:
            with self._host.visit(movable):
                yield part

    def now(self, fragment: Fragment, tensor: Tensor) -> Tensor:
        """One of a fragment's `state_tensors`, on the device or in the host's memory. Do not change it."""
        return self._part_of[id(fragment)].now(tensor)

    @torch.no_grad()
    def step(self, inner: Sequence[mcore.MegatronOptimizer]) -> None:
        """Does the work of `step_with_ready_grads` of megatron-core's optimizers `inner`. Collective over the data ranks."""
        gradients = {id(fragment): fragment.main.grad for part, _ in self._parts for fragment in part}
        for part, _ in self._parts:
            for fragment in part:
                fragment.main.grad = None  # AdamW steps only tensors with a gradient
        for visited in self.visits():
            for fragment in visited:
                fragment.main.grad = gradients.pop(id(fragment))
            for adam in {id(fragment.adam): fragment.adam for fragment in visited}.values():
                adam.step()
            for fragment in visited:
                fragment.main.grad = None
                if fragment.copied:
                    fragment.cut(fragment.param).copy_(fragment.main.flatten())
        for each in inner:
            if isinstance(each, mcore.DistributedOptimizer):
                for chunk in each.model_chunks:
                    chunk.start_param_sync()


def cut(fragments: Sequence[Fragment], part_bytes: int) -> list[list[Fragment]]:
    """Runs of fragments with at most `part_bytes` of state each; a larger fragment is a run of its own."""
    parts: list[list[Fragment]] = []
    room = 0
    for fragment in fragments:
        if fragment.state_bytes > room:
            parts.append([])
            room = part_bytes
        parts[-1].append(fragment)
        room -= fragment.state_bytes
    return parts
