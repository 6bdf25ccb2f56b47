"""An optimizer's moments and full-precision weights, in parts that rest in the host's memory and visit the device for their step.

AdamW computes each element of its own gradient and state, so steps of parts are the bits of one step. While one part is on the device, the
others are not: the peak of a step is that of its largest part.

Invariant: outside of `step` and `visits`, no part is on the device.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.megatron import mcore
from polyreme_trainer.megatron.fragments import Fragment
from polyreme_trainer.megatron.host_memory import HostMemory
from polyreme_trainer.megatron.memory.state import PART_BYTES
from polyreme_trainer.megatron.offload import Movable


class OptimizerParts:
    """The parts of one optimizer.

    Args:
        fragments: all that this rank steps.
        host: moves the parts.
    """

    def __init__(self, fragments: Iterable[Fragment], host: HostMemory) -> None:
        self._host = host
        self._parts = [(part, self._movable(part)) for part in cut(list(fragments))]
        self._part_of = {id(fragment): movable for part, movable in self._parts for fragment in part}
        for _ in self.visits():
            pass

    def _movable(self, part: Sequence[Fragment]) -> Movable:
        return self._host.movable(lambda: [tensor for fragment in part for tensor in fragment.state_tensors().values()])

    def visits(self) -> Iterator[Sequence[Fragment]]:
        """Every part, each while it is on the device."""
        for part, movable in self._parts:
            with self._host.visit(movable):
                yield part

    def now(self, fragment: Fragment, tensor: Tensor) -> Tensor:
        """One of a fragment's `state_tensors`, wherever its bytes are now. Not to be changed."""
        return self._part_of[id(fragment)].now(tensor)

    @torch.no_grad()
    def step(self, inner: Sequence[Any]) -> None:
        """What megatron-core's optimizers `inner` do in `step_with_ready_grads`. Collective over the data ranks."""
        gradients = {id(fragment): fragment.main.grad for part, _ in self._parts for fragment in part}
        for part, _ in self._parts:
            for fragment in part:
                fragment.main.grad = None  # AdamW steps what has a gradient
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


def cut(fragments: Sequence[Fragment]) -> list[list[Fragment]]:
    """Runs of fragments with at most PART_BYTES of state each, or one fragment."""
    parts: list[list[Fragment]] = []
    room = 0
    for fragment in fragments:
        if fragment.state_bytes > room:
            parts.append([])
            room = PART_BYTES
        parts[-1].append(fragment)
        room -= fragment.state_bytes
    return parts
