"""The memory of a learner rank as a sum of named terms, and the memory of a policy's versions outside the ranks.

Invariant: an estimate depends only on the configuration and the models' config.json files. It counts tensors: not the interpreter, not the
device's context, and not the buffers of collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyreme.config.trainer import OffloadConfig, ParallelConfig
from polyreme.weights.delta import WHOLE_ABOVE
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.memory.activations import MicroBatchSize, step_terms
from polyreme_trainer.memory.phases import copy_phase, resting, training_phase
from polyreme_trainer.memory.sharding import Sharding, shardings
from polyreme_trainer.memory.state import WIDTHS, Addend, Model, copy_terms, state_of

GIB = 2**30
ARENA_SLOTS = 3
"""Number of policy versions in the arena, the default of `Arena.create`."""


@dataclass(frozen=True)
class RankEstimate:
    """The peak memory of one rank.

    Attributes:
        state: the models' weights, gradients and optimizer state, which are on the device at the same time.
        step: the additional memory of training one model; of several trained models, the largest.
        host: the terms that are in the host's memory while they are not in use. They may repeat terms of `state`.
        moves: whether `step` is a part of `host`, which leaves the host's memory meanwhile.
    """

    state: list[Addend]
    step: list[Addend]
    host: list[Addend] = field(default_factory=list)
    moves: bool = False

    @property
    def terms(self) -> list[Addend]:
        return [*self.state, *self.step]

    @property
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms)

    @property
    def host_bytes(self) -> int:
        return sum(term.nbytes for term in self.host)

    @property
    def all_terms(self) -> list[Addend]:
        """The terms of device and host together, each once, for machines where both are the same memory."""
        return list(dict.fromkeys([*self.state, *([] if self.moves else self.step), *self.host]))

    @property
    def all_bytes(self) -> int:
        return sum(term.nbytes for term in self.all_terms)


def moments(
    models: Sequence[Model], sharding: Sharding, batch: MicroBatchSize, offload: OffloadConfig | None = None
) -> dict[str, RankEstimate]:
    """The estimates of one rank in the phases of training. Raises ValueError when a model's sizes do not divide over the ranks.

    Args:
        models: the actor first.

    Returns:
        By name: "ROLE", the micro-batches of a trained model; "ROLE optimizer step", if that moves state; "ROLE copy", when a model takes the
        actor's weights.
    """
    offload = offload or OffloadConfig()
    states = [state_of(model, sharding) for model in models]
    host = resting(states, offload)
    found = {}
    for model, working in zip(models, states, strict=True):
        if model.trained:
            phase = training_phase(states, working, offload)
            found[model.role] = RankEstimate(phase.device, step_terms(model, sharding, batch), host)
            if phase.step:
                found[f"{model.role} optimizer step"] = RankEstimate(phase.device, phase.step, host, moves=True)
        if model.copies_actor:
            # A fixed reference is loaded from version 0, which exists only when every trained model has taken the weights.
            pairs = zip(models, states, strict=True)
            present = [state for each, state in pairs if each.trained or each.copies_actor or not model.trained]
            phase = copy_phase(present, states[0], working, offload)
            found[f"{model.role} copy"] = RankEstimate(
                phase.device, copy_terms(models[0], model, sharding), resting(present, offload)
            )
    return found


def stage_estimates(
    models: Sequence[Model],
    parallel: ParallelConfig,
    batch: MicroBatchSize,
    offload: OffloadConfig | None = None,
    together: bool = False,
) -> list[RankEstimate]:
    """The largest of the `moments` of one rank of each pipeline stage.

    Args:
        together: whether device and host are the same memory, so that the bytes of both count.

    Raises:
        ValueError: a model's sizes do not divide over the ranks.
    """
    every = [moments(models, sharding, batch, offload).values() for sharding in shardings(models[0].arch, parallel)]
    return [max(found, key=lambda moment: moment.all_bytes if together else moment.nbytes) for found in every]


def arena_term(parameters: int, dtype: str) -> Addend:
    """The shared memory of a machine's part of the policy's versions. parameters: those of the part."""
    width = WIDTHS[dtype]
    return Addend(
        "arena", ARENA_SLOTS * parameters * width, f"{ARENA_SLOTS} versions x {parameters:,} parameters x {width} bytes"
    )


def delta_term(parameters: int, dtype: str) -> Addend:
    """The deltas that a machine keeps of its part of the policy's versions. parameters: those of the part.

    Older ones are discarded beyond this size. The memory in which a delta is computed or combined comes in addition, for a short time.
    """
    width = WIDTHS[dtype]
    return Addend(
        "deltas", int(WHOLE_ABOVE * parameters * width), f"at most {WHOLE_ABOVE} x {parameters:,} parameters x {width} bytes"
    )


def replica_weights(arch: Architecture, dtype: str, tensor: int) -> int:
    """Bytes of the policy's weights on one device of a replica of `tensor` devices."""
    return -(-arch.parameters * WIDTHS[dtype] // tensor)


def cache_bytes_per_token(arch: Architecture, dtype: str, tensor: int) -> int:
    """Bytes of one token's keys and values on one device of a replica of `tensor` devices, all layers together.

    A head that several devices need is stored on each of them.
    """
    return 2 * arch.layers * max(1, arch.kv_heads // tensor) * arch.head_dim * WIDTHS[dtype]
