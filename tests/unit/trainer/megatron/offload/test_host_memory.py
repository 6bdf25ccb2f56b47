"""Which models are on the device, on models of one tensor."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from polyreme.config.trainer import OffloadConfig
from polyreme_trainer.megatron.offload.host_memory import HostMemory


class Lone:
    """A model of one tensor of 16 bytes."""

    host: HostMemory | None = None

    def __init__(self, value: float) -> None:
        self.weight = torch.full((4,), value)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.weight

    @property
    def is_there(self) -> bool:
        return self.weight.untyped_storage().nbytes() > 0


def admitted(config: OffloadConfig) -> tuple[HostMemory, list[Any]]:
    host = HostMemory(config, pin=False)
    return host, [host.admit(lambda value=value: Lone(value)) for value in (1.0, 2.0, 3.0)]  # type: ignore[misc]


def test_only_the_models_in_use_are_on_the_device() -> None:
    host, models = admitted(OffloadConfig(idle_models=True))
    actor, critic, reference = models
    part = reference.weight[1:3]
    assert [model.is_there for model in models] == [False, False, True], "the others leave before one is built"
    host.use(critic)
    assert [model.is_there for model in models] == [False, True, False]
    assert [host.has_on_device(model) for model in models] == [False, True, False]
    critic.weight += 1
    host.use(actor, critic)
    assert [model.is_there for model in models] == [True, True, False]
    assert host.now(critic, critic.weight) is critic.weight
    copy = host.now(reference, part)
    assert copy.tolist() == [3, 3] and not reference.is_there
    host.use(reference)
    assert host.now(critic, critic.weight).tolist() == [3, 3, 3, 3]
    assert host.take_moves().nbytes == 16 * 8
    assert host.take_moves().nbytes == 0


def test_what_a_visit_has_moved_leaves_the_device_also_when_the_visit_fails() -> None:
    host, (model, _, _) = admitted(OffloadConfig(optimizer=True))
    movable = host.movable(model.tensors)
    with host.visit(movable):
        assert model.is_there
    with pytest.raises(RuntimeError, match="step"), host.visit(movable):
        model.weight += 1
        raise RuntimeError("the step failed")
    assert not model.is_there and movable.now(model.weight).tolist() == [2, 2, 2, 2]
    assert host.take_moves().nbytes == 16 * 3
    with host.visit(movable):
        assert model.weight.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("config", [OffloadConfig(), OffloadConfig(optimizer=True)], ids=["none", "optimizer"])
def test_models_stay_without_the_setting(config: OffloadConfig) -> None:
    host, models = admitted(config)
    host.use(models[0])
    assert all(model.is_there and model.host is host for model in models)
    assert host.moves.nbytes == 0
