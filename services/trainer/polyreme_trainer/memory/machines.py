"""How the tensors of a model are divided among the learner's machines, where their ranks write versions and save weights.

Invariant: every tensor counts on one machine, that of the ranks that write it (see `version_writer`). Machines that hold only copies have none.
"""

import math

from polyreme.config.trainer import ParallelConfig
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import stage_rows
from polyreme_trainer.memory.sharding import shardings


def written_parameters(arch: Architecture, parallel: ParallelConfig) -> list[int]:
    """The number of parameters that the ranks of each machine write, without padding. Raises ValueError when the sizes do not divide."""
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
