"""The ranks of a learner on this machine, as programs under torchrun's environment contract.

Invariant: all ranks of one start use one rendezvous port, which is chosen for that start.
"""

import sys
from collections.abc import Mapping, Sequence

from polyreme.config.trainer import ParallelConfig
from polyreme.net.ports import free_port
from polyreme.process.supervisor import ProcessSpec
from polyreme_trainer.megatron.mindspeed import DEVICE


def compute_environment(parallel: ParallelConfig, device: str) -> dict[str, str]:
    """The environment variables that set the device and the threads of one rank."""
    return {
        DEVICE: device,
        "OMP_NUM_THREADS": str(parallel.threads),
        "OMP_WAIT_POLICY": "passive",  # a spinning thread takes the core that another process needs
    }


def rank_programs(parallel: ParallelConfig, arguments: Sequence[str], environment: Mapping[str, str]) -> list[ProcessSpec]:
    """One program per rank: Python with `arguments`, `environment` and the rank's numbers."""
    world, port = parallel.world_size, free_port()
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
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(world)
    ]
