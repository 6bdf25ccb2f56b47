"""Where the state is while a model trains."""

import pytest

from polyreme.config.trainer import OffloadConfig
from polyreme_trainer.megatron.offload import PART_BYTES
from polyreme_trainer.memory.estimate import on_device, resting, step_term
from polyreme_trainer.memory.state import Addend, ModelState

GIB = 2**30


def state(role: str, weights: int, trained: bool = True, largest: int = 0) -> ModelState:
    """Of a model with so many GiB of weights in bfloat16."""

    def term(name: str, factor: int) -> tuple[Addend, ...]:
        return (Addend(f"{role} {name}", factor * weights * GIB, ""),) if trained or name == "weights" else ()

    return ModelState(role, term("weights", 1), term("gradients", 2), term("optimizer", 6), largest)


ACTOR, CRITIC, REFERENCE = state("actor", 2), state("critic", 1), state("reference", 2, trained=False)
EVERY = [ACTOR, CRITIC, REFERENCE]
MODELS = ["actor weights", "critic weights", "reference weights"]
OPTIMIZERS = ["actor optimizer", "critic optimizer"]


def names(terms: list[Addend]) -> list[str]:
    return sorted(term.name for term in terms)


@pytest.mark.parametrize(
    ("offload", "device"),
    [
        ({}, [*MODELS, "actor gradients", "critic gradients", *OPTIMIZERS]),
        ({"optimizer": True}, [*MODELS, "critic gradients"]),
        ({"idle_models": True}, ["critic weights", "critic gradients", *OPTIMIZERS]),
        ({"optimizer": True, "idle_models": True}, ["critic weights", "critic gradients"]),
    ],
)
def test_the_state_while_the_critic_trains(offload: dict[str, bool], device: list[str]) -> None:
    assert names(on_device(EVERY, [CRITIC], CRITIC, OffloadConfig(**offload))) == sorted(device)


@pytest.mark.parametrize(
    ("working", "part"),
    [(ACTOR, PART_BYTES), (state("small", 0), 0), (state("wide", 2, largest=3 * GIB), 3 * GIB)],
    ids=["parts", "less than a part", "one parameter"],
)
def test_a_step_brings_a_part_or_the_largest_parameter(working: ModelState, part: int) -> None:
    assert step_term(working).nbytes == part


def test_every_model_rests_while_they_change_places() -> None:
    both = OffloadConfig(optimizer=True, idle_models=True)
    assert names(resting(EVERY, both)) == sorted([*MODELS, *OPTIMIZERS])
    assert names(resting([ACTOR], both)) == ["actor optimizer"], "a single model is never idle"
    assert resting(EVERY, OffloadConfig()) == []
