"""Which machine of the learner holds which tensors of a version.

Invariant: every tensor belongs to one part, that of the machine whose ranks write it. The first machine has part 0.
"""

from collections.abc import Collection, Sequence

import torch.distributed as dist

from polyreme.errors import ConfigError


def machine_of(rank: int, ranks: int, nodes: int) -> int:
    """The machine of a rank. Machines have equally many ranks, in order."""
    return rank // (ranks // nodes)


def plan_parts(written: Sequence[Collection[str]], nodes: int) -> list[frozenset[str]]:
    """The tensors of each part. Pure.

    Args:
        written: for each rank, the names of the tensors of which it writes a slice.
        nodes: the number of machines.

    Returns:
        One set of names for each machine that writes any: the first ones.

    Raises:
        ConfigError: ranks of several machines write slices of one tensor.
    """
    parts: list[set[str]] = [set() for _ in range(nodes)]
    for rank, names in enumerate(written):
        parts[machine_of(rank, len(written), nodes)] |= set(names)
    holders: dict[str, int] = {}
    for machine, names in enumerate(parts):
        for name in sorted(names):
            if (first := holders.setdefault(name, machine)) != machine:
                raise ConfigError(
                    "every tensor of the model on the ranks of one machine",
                    f"slices of {name} on machines {first} and {machine}",
                    "Change trainer.parallel, so that tensor ranks and expert tensor ranks share a machine.",
                )
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return [frozenset(names) for names in parts]


def gather_parts(mine: Collection[str], nodes: int) -> list[frozenset[str]]:
    """`plan_parts` of all ranks; `mine` is what this rank writes. Collective."""
    written: list[Collection[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(written, sorted(mine))
    return plan_parts(written, nodes)
