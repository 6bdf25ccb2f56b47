"""Divides the state between the device and the host's memory while one model trains, according to `trainer.offload`.

With offload, gradients exist only during their model's steps. An optimizer step has its own peak: the activations have been freed, and a part
of the moments and full-precision weights is on the device. So has a copy of the actor's weights into another model, because both are there.

Invariant: the terms of a phase on the device and in the host's memory together are all the state that exists in this phase.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyreme.config.trainer import OffloadConfig
from polyreme_trainer.megatron.offload import PART_BYTES
from polyreme_trainer.memory.state import Addend, ModelState


@dataclass(frozen=True)
class Phase:
    """The state while one model trains.

    Attributes:
        device, host: the terms on the device and in the host's memory.
        step: the state that an optimizer step moves to the device; empty if the state is always there.
    """

    device: list[Addend] = field(default_factory=list)
    host: list[Addend] = field(default_factory=list)
    step: list[Addend] = field(default_factory=list)


def training_phase(states: Sequence[ModelState], working: ModelState, offload: OffloadConfig) -> Phase:
    """The location of all models' state while `working` trains."""
    phase = Phase()
    for state in states:
        is_idle = state is not working
        (phase.host if is_idle and offload.idle_models else phase.device).extend(state.weights)
        if not (is_idle and offload.is_set):
            phase.device.extend(state.gradients)
        (phase.host if offload.optimizer else phase.device).extend(state.optimizer)
    if offload.optimizer:
        whole = sum(term.nbytes for term in working.optimizer)
        part = min(whole, max(PART_BYTES, working.largest))
        arithmetic = f"of {whole:,} bytes, {PART_BYTES:,} at a time, or of the largest parameter"
        phase.step.append(Addend(f"{working.role} optimizer step", part, arithmetic))
    return phase


def copy_phase(states: Sequence[ModelState], actor: ModelState, copy: ModelState, offload: OffloadConfig) -> Phase:
    """The location of all models' state while `copy` takes the actor's weights."""
    phase = Phase()
    for state in states:
        (phase.device if state in (actor, copy) or not offload.idle_models else phase.host).extend(state.weights)
        if not offload.is_set:
            phase.device.extend(state.gradients)
        (phase.host if offload.optimizer else phase.device).extend(state.optimizer)
    return phase


def resting(states: Sequence[ModelState], offload: OffloadConfig) -> list[Addend]:
    """All state that can be in the host's memory. While models are exchanged, all of them can be there at once."""
    weights = [term for state in states for term in state.weights] if offload.idle_models and len(states) > 1 else []
    return weights + ([term for state in states for term in state.optimizer] if offload.optimizer else [])
