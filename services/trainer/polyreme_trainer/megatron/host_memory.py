"""What a rank keeps in the host's memory while it is not in use: idle models, and the state of optimizers.

Invariant: with `idle_models`, only the models of the newest `use` are on the device. A move changes no byte.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from polyreme.config.trainer import OffloadConfig
from polyreme_trainer.megatron.offload import Movable


class Resident(Protocol):
    """A model as far as its memory is concerned. host: who moves it."""

    host: "HostMemory | None"

    def tensors(self) -> Iterator[Tensor]: ...


Model = TypeVar("Model", bound=Resident)


@dataclass
class Moves:
    """What was moved between device and host, in both directions."""

    nbytes: int = 0
    seconds: float = 0.0


class HostMemory:
    """The models of one rank, and what of them rests in the host's memory.

    Args:
        config: what rests there.
        pin: page-locked memory, for accelerators.

    Attributes:
        moves: since the last `take_moves`.
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
        """A tensor of a model, wherever its bytes are now. Not to be changed."""
        return self._models[model].now(tensor)

    def movable(self, tensors: Callable[[], Iterable[Tensor]]) -> Movable:
        """Tensors that only a `visit` brings to the device."""
        return Movable(tensors, self._pin)

    @contextmanager
    def visit(self, movable: Movable) -> Iterator[None]:
        """Within the block, the tensors are on the device. They leave it afterwards, also those that the block has created."""
        began = time.perf_counter()
        self.moves.nbytes += movable.come_back()
        self.moves.seconds += time.perf_counter() - began
        yield
        began = time.perf_counter()
        self.moves.nbytes += movable.leave()
        self.moves.seconds += time.perf_counter() - began
