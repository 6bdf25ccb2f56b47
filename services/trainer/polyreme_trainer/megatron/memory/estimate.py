"""The memory of a learner rank as a sum of named terms, and the memory of a policy's versions outside the ranks.

Invariant: an estimate depends only on the configuration and the models' config.json files. It counts tensors: not the interpreter, not the
device's context, and not the buffers of collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polyreme.config.trainer import ParallelConfig
from polyreme_trainer.megatron.families.base import Architecture
from polyreme_trainer.megatron.memory.activations import MicroBatchSize, step_terms
from polyreme_trainer.megatron.memory.sharding import Sharding, shardings
from polyreme_trainer.megatron.memory.state import WIDTHS, Addend, Model, state_terms

ARENA_SLOTS = 3
"""Number of policy versions in the arena, the default of `Arena.create`."""


@dataclass(frozen=True)
class RankEstimate:
    """The peak memory of one rank.

    Attributes:
        state: the models' weights, gradients and optimizer state, which exist at the same time.
        step: the additional memory of training one model; of several trained models, the largest.
    """

    state: list[Addend]
    step: list[Addend]

    @property
    def terms(self) -> list[Addend]:
        return [*self.state, *self.step]

    @property
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms)


def rank_estimate(models: Sequence[Model], sharding: Sharding, batch: MicroBatchSize) -> RankEstimate:
    """The estimate of one rank. Raises ValueError when a model's sizes do not divide over the ranks."""
    state = [term for model in models for term in state_terms(model, sharding)]
    steps = [step_terms(model, sharding, batch) for model in models if model.trained]
    return RankEstimate(state, max(steps, key=lambda terms: sum(term.nbytes for term in terms)))


def largest_rank(models: Sequence[Model], parallel: ParallelConfig, batch: MicroBatchSize) -> RankEstimate:
    """The estimate of the rank with the largest memory. Raises ValueError when a model's sizes do not divide over the ranks."""
    every = [rank_estimate(models, sharding, batch) for sharding in shardings(models[0].arch, parallel)]
    return max(every, key=lambda estimate: estimate.nbytes)


def arena_term(arch: Architecture, dtype: str) -> Addend:
    """The shared memory of the policy's versions on the learner's first machine."""
    count, width = arch.parameters, WIDTHS[dtype]
    return Addend("arena", ARENA_SLOTS * count * width, f"{ARENA_SLOTS} versions x {count:,} parameters x {width} bytes")


def cache_bytes_per_token(arch: Architecture, dtype: str, tensor: int) -> int:
    """Bytes of one token's keys and values on one device of a replica of `tensor` devices, all layers together.

    A head that several devices need is stored on each of them.
    """
    return 2 * arch.layers * max(1, arch.kv_heads // tensor) * arch.head_dim * WIDTHS[dtype]
