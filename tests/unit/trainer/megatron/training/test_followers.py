"""Followers of the actor, on synthetic weights. tests/integration/test_learner.py tests them in an engine, over a resume."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyreme_trainer.megatron.training.followers import Followers, move_average


class Weights:
    """A minimal model for a follower, with two parameters."""

    def __init__(self, dtype: str, value: float = 0.0) -> None:
        self.dtype = dtype
        self._params = {name: torch.full((2,), value, dtype=getattr(torch, dtype)) for name in ("a", "b")}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._params

    weights = state_dict  # no adapters are added

    def use(self, *others: "Weights") -> None:
        """They have no device to leave."""

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, param in self._params.items():
            param.copy_(state[name])

    def set(self, value: float) -> None:
        for param in self._params.values():
            param.fill_(value)

    @property
    def value(self) -> float:
        [value] = {float(x) for param in self._params.values() for x in param}
        return value


def followers(actor: Any, renew_interval: int, decay: float | None) -> Any:
    return Followers(actor, lambda name, dtype: SimpleNamespace(name=name, model=Weights(dtype)), renew_interval, decay)  # type: ignore[arg-type, return-value]


def test_the_average_of_a_bfloat16_actor_keeps_steps_that_bfloat16_would_lose() -> None:
    average, actor = Weights("float32", 1.0), Weights("bfloat16", 1.0078125)
    expected, stand_ins = 1.0, (average, actor)
    for _ in range(50):
        move_average(*stand_ins, decay=0.999)  # type: ignore[arg-type]
        expected = 0.999 * expected + 0.001 * 1.0078125
    assert average.value == pytest.approx(expected, abs=1e-6)
    assert average.value > 1.0003


def test_an_average_of_what_does_not_change_does_not_change() -> None:
    average, actor = Weights("float32", 0.1), Weights("float32", 0.1)
    move_average(average, actor, decay=0.3)  # type: ignore[arg-type]
    assert average.value == actor.value


def test_a_reference_is_renewed_after_every_interval() -> None:
    actor = Weights("float32", 7.0)
    made = followers(actor, renew_interval=3, decay=None)
    made.begin()
    seen = []
    for iteration in range(1, 8):
        before = made.reference.model.value
        actor.set(float(iteration))
        metrics = made.follow(iteration)
        seen.append((before, metrics["reference/version"]))
    assert seen == [(7.0, 0)] * 3 + [(3.0, 3)] * 3 + [(6.0, 6)]
    assert [role.name for role in made.roles] == ["reference"]


@pytest.mark.parametrize("saved_at", range(1, 8))
def test_a_resume_at_any_iteration_goes_on_with_the_same_bits(saved_at: int) -> None:
    actor = Weights("float32")
    whole = followers(actor, renew_interval=3, decay=0.7)
    whole.begin()
    for iteration in range(1, 9):
        actor.set(1 / iteration)
        whole.follow(iteration)
        if iteration == saved_at:
            saved = [{name: param.clone() for name, param in role.model.state_dict().items()} for role in whole.roles]
    resumed = followers(actor, renew_interval=3, decay=0.7)
    for role, state in zip(resumed.roles, saved, strict=True):
        role.model.load_state_dict(state)
    for iteration in range(saved_at + 1, 9):
        actor.set(1 / iteration)
        resumed.follow(iteration)
    assert [role.model.value for role in resumed.roles] == [role.model.value for role in whole.roles]


def test_without_either_nothing_follows() -> None:
    made = followers(Weights("float32"), renew_interval=0, decay=None)
    assert (made.roles, made.follow(1), made.export({})) == ([], {}, None)
