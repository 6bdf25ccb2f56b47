"""What is on the device while one model trains, and what rests in the host's memory, `trainer.offload`.

With offload, gradients exist only during their model's steps. An optimizer step has its own peak: the activations are gone, and a part of the
moments and full-precision weights is there.

Invariant: the terms of a phase on the device and in the host's memory together are all the state that exists then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyreme.config.trainer import OffloadConfig
from polyreme_trainer.megatron.memory.state import PART_BYTES, Addend, ModelState


@dataclass(frozen=True)
class Phase:
    """The state while one model trains.

    Attributes:
        device, host: where the state is.
        step: what an optimizer step brings to the device; nothing where it is there anyway.
    """

    device: list[Addend] = field(default_factory=list)
    host: list[Addend] = field(default_factory=list)
    step: list[Addend] = field(default_factory=list)


def training_phase(states: Sequence[ModelState], working: ModelState, offload: OffloadConfig) -> Phase:
    """Where the state of all models is while `working` trains."""
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


def resting(states: Sequence[ModelState], offload: OffloadConfig) -> list[Addend]:
    """All that may be in the host's memory: while models change places, every one of them is."""
    weights = [term for state in states for term in state.weights] if offload.idle_models and len(states) > 1 else []
    return weights + ([term for state in states for term in state.optimizer] if offload.optimizer else [])
