"""The ranks of a learner on this machine, as programs under torchrun's environment contract.

Invariant: all ranks of one start use one rendezvous port, chosen for that start. They are reached through loopback alone.
"""

import sys
from collections.abc import Mapping, Sequence

from polyreme.config.trainer import ParallelConfig
from polyreme.net.endpoint import interface_of
from polyreme.net.ports import free_port, loopback
from polyreme.process.machine import thread_environment
from polyreme.process.supervisor import ProcessSpec
from polyreme_trainer.megatron.mindspeed import DEVICE


def compute_environment(parallel: ParallelConfig, device: str) -> dict[str, str]:
    """The environment variables that set the device and the threads of one rank."""
    return {DEVICE: device, **thread_environment(parallel.threads)}


def local_rendezvous() -> dict[str, str]:
    """The environment variables by which the ranks of one machine find each other: all their sockets are on loopback."""
    address = loopback()
    interface = interface_of(address)
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port(address)),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # True, from a torchrun around this process, names a store that is not theirs
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


def rank_programs(parallel: ParallelConfig, arguments: Sequence[str], environment: Mapping[str, str]) -> list[ProcessSpec]:
    """One program per rank: Python with `arguments`, `environment` and the rank's numbers."""
    world, rendezvous = parallel.world_size, local_rendezvous()
    return [
        ProcessSpec(
            f"learner-{rank}",
            (sys.executable, *arguments),
            {
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                **rendezvous,
            },
        )
        for rank in range(world)
    ]
