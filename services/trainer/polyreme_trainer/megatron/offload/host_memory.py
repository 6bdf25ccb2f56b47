"""Keeps in the host's memory what a rank does not need at the moment: idle models, and the state of optimizers.

Invariant: with `idle_models`, only the models of the newest `use` are on the device. A move changes no byte.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from polyreme.config.trainer import OffloadConfig
from polyreme_trainer.megatron.offload.offload import Movable


class Resident(Protocol):
    """A model whose memory can be moved. host: the object that moves it."""

    host: "HostMemory | None"

    def tensors(self) -> Iterator[Tensor]: ...


Model = TypeVar("Model", bound=Resident)


@dataclass
class Moves:
    """The bytes moved between device and host, in both directions, and the time that the moves took."""

    nbytes: int = 0
    seconds: float = 0.0


class HostMemory:
    """The models of one rank. It moves them between the device and the host's memory.

    Args:
        config: selects what is kept in the host's memory.
        pin: whether to use page-locked memory, for accelerators.

    Attributes:
        moves: the moves since the last `take_moves`.
    """

    def __init__(self, config: OffloadConfig, pin: bool) -> None:
        self.config, self._pin = config, pin
        self._models: dict[Resident, Movable] = {}
        self.moves = Moves()

    def admit(self, build: Callable[[], Model]) -> Model:
        """Builds a model, and owns its memory from then on. Idle models leave the device first."""
        self.use()
        model = build()
        model.host = self
        self._models[model] = Movable(model.tensors, self._pin)
        return model

    def use(self, *models: Resident) -> None:
        """Brings these models to the device; all others leave it first."""
        if not self.config.idle_models:
            return
        began = time.perf_counter()
        for model, movable in self._models.items():
            if model not in models:
                self.moves.nbytes += movable.leave()
        for model in models:
            self.moves.nbytes += self._models[model].come_back()
        self.moves.seconds += time.perf_counter() - began

    def take_moves(self) -> Moves:
        """The moves since the last call."""
        taken, self.moves = self.moves, Moves()
        return taken

    def has_on_device(self, model: Resident) -> bool:
        """Whether a model may compute."""
        return not self._models[model].is_away

    def now(self, model: Resident, tensor: Tensor) -> Tensor:
        """A tensor of a model, on the device or in the host's memory. Do not change it."""
        return self._models[model].now(tensor)

    def movable(self, tensors: Callable[[], Iterable[Tensor]]) -> Movable:
        """Tensors that only a `visit` brings to the device."""
        return Movable(tensors, self._pin)

    @contextmanager
    def visit(self, movable: Movable) -> Iterator[None]:
        """In the block, the tensors are on the device. Afterwards all leave it, with those that it created, even if it raises."""
        began = time.perf_counter()
        self.moves.nbytes += movable.come_back()
        self.moves.seconds += time.perf_counter() - began
        try:
            yield
        finally:
            began = time.perf_counter()
            self.moves.nbytes += movable.leave()
            self.moves.seconds += time.perf_counter() - began
