"""How the memory of a learner's models is divided among its ranks.

Invariant: a kind of parallelism divides the estimate in this module only. The other modules read the divisors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from polyreme.config.trainer import ParallelConfig
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, stage_rows


@dataclass(frozen=True)
class Sharding:
    """One rank's share.

    Attributes:
        rank: the rank's coordinates among the tensor, pipeline and expert ranks, which determine its parameters.
        optimizer_ranks: ranks over which each parameter's optimizer state is divided. The state of experts is divided only among
            the ranks that have the same experts.
        sequence_ranks: ranks over which the activations outside of attention and MLP are divided.
        micro_batches: number of micro-batches whose activations exist at once, counted once in each virtual stage.
        context_ranks: ranks that share the tokens of a micro-batch; each has all keys and values.
    """

    rank: Rank = field(default_factory=Rank)
    optimizer_ranks: int = 1
    sequence_ranks: int = 1
    micro_batches: int = 1
    context_ranks: int = 1

    @property
    def expert_optimizer_ranks(self) -> int:
        """Ranks over which the optimizer state of each expert is divided."""
        return self.optimizer_ranks * self.rank.tp // self.rank.expert_places

    def layers(self, arch: Architecture) -> int:
        """The layers of one virtual stage."""
        return arch.layers // (self.rank.pp * self.rank.vpp)

    @property
    def first(self) -> bool:
        """Whether the rank has the embedding."""
        return self.rank.pp_rank == 0

    @property
    def last(self) -> bool:
        """Whether the rank has the output layer."""
        return self.rank.pp_rank == self.rank.pp - 1


def shardings(arch: Architecture, parallel: ParallelConfig) -> Iterator[Sharding]:
    """The different shares of the layout: one for each pipeline stage. All ranks of a stage hold the same amount.

    With several data or context ranks each keeps an equal part of the optimizer's state. A stage starts one micro-batch for
    itself and one per later stage before the first gradient arrives. With virtual stages it starts two per later stage; before
    these it starts one for each stage in each of its virtual stages except the last (Narayanan et al. 2021, section 2.2).
    """
    sequence = parallel.tensor if arch.experts else 1  # megatron-core divides experts over tensor ranks with the sequence only
    stages, virtual = parallel.pipeline, parallel.virtual_pipeline
    experts = 0 if parallel.expert_tensor in (None, parallel.tensor) else parallel.expert_tensor
    for stage in range(stages):
        rank = Rank(0, parallel.tensor, stage, stages, 0, parallel.expert, vpp=virtual, etp=experts)
        later = stages - stage - 1
        alive = 1 + (later if virtual == 1 else 2 * later + (virtual - 1) * stages)
        yield Sharding(rank, parallel.copies, sequence, alive, parallel.context)


def written_parameters(arch: Architecture, parallel: ParallelConfig) -> list[int]:
    """How many parameters the ranks of each machine write and save, without padding. Raises ValueError unless the sizes divide.

    Each tensor counts on the machine of the ranks that write it (see `version_writer`). Machines that hold only copies have none.
    """
    if parallel.nodes == 1:
        return [arch.parameters]
    counts, counted = [0] * parallel.nodes, set[str]()
    for stage, sharding in enumerate(shardings(arch, parallel)):
        first = stage * parallel.tensor * parallel.copies
        for place in range(sharding.rank.places):  # the first ranks of a stage write all of it
            machine = (first + place) // parallel.ranks_per_node
            for row, writes in stage_rows(arch, sharding.rank.at(place)):
                for name, shape in arch.shapes(row).items() if writes else ():
                    if name not in counted and name not in row.absent:
                        counted.add(name)
                        counts[machine] += math.prod(shape)
    return counts
