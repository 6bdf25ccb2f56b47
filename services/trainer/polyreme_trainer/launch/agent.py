"""torchrun's agent on one machine of a learner: it starts this machine's ranks and ends when the first of them fails.

Invariant: the agent exits with the code of the rank that reported why it failed. It restarts nothing: a lost rank fails the
launch on every machine. Its ranks die with it, however it dies: each asks the kernel for a death signal (`learner/__main__`).
"""

import os
import sys
import time
from urllib.parse import urlsplit

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from polyreme.errors import PolyremeError, UnavailableError
from polyreme.net.endpoint import interface_of, own_address
from polyreme.net.torch_store import narrow_stores
from polyreme.process.lifecycle import exit_on_error, signal_name
from polyreme.process.machine import MemoryKills, killed_for_memory_since
from polyreme.process.supervisor import FINAL_CODES
from polyreme_trainer.learner.leader import AGENT_PID

_JOIN_SECONDS = 120
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")


def launch(address: str, name: str, node: int, nodes: int, ranks: int, program: list[str]) -> None:
    """Runs this machine's ranks of one launch to their end.

    Args:
        address: host:port of node 0, the rendezvous of all agents and ranks.
        name: the launch's name. Agents of another launch cannot join.
        program: Python's arguments for a rank.

    Raises:
        UnavailableError: the rendezvous failed. PolyremeError: a rank was killed.
        SystemExit: a rank failed; with its exit code.
    """
    os.environ[AGENT_PID] = str(os.getpid())
    interface = interface_towards(address)
    for variable in _INTERFACES:  # the default is the address of the host name, which may be on another network
        os.environ.setdefault(variable, interface)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=name,
        role="learner",
        rdzv_backend="static",
        rdzv_endpoint=address,
        rdzv_configs={"rank": node, "timeout": _JOIN_SECONDS},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks write to the agent's outputs
    )
    narrow_stores(static_tcp_rendezvous)
    kills = MemoryKills.now()
    try:
        elastic_launch(config, sys.executable)(*program)
    except (DistNetworkError, DistStoreError) as error:
        raise UnavailableError(
            f"the agents of all {nodes} machines of the learner at {address} within {_JOIN_SECONDS} s",
            str(error).partition("\n")[0],
            "Let these machines reach one another on all ports, or set the trainer's --advertise and --learner-port.",
        ) from None
    except ChildFailedError as failed:
        rank, first = min(failed.failures.items(), key=lambda item: (item[1].exitcode not in FINAL_CODES, item[1].timestamp))
        if first.exitcode < 0:
            by = signal_name(-first.exitcode)
            lack = killed_for_memory_since(kills)
            raise PolyremeError(f"rank {rank} to keep running", f"{by}{f' ({lack})' if lack else ''}", "See its log.") from None
        sys.exit(first.exitcode)


def interface_towards(address: str) -> str:
    """The name of the network interface towards `address`. Raises UnavailableError: there is no route within the deadline."""
    parts = urlsplit(f"//{address}")
    host, port = str(parts.hostname), int(parts.port or 0)
    deadline = time.monotonic() + _JOIN_SECONDS
    while True:
        try:
            own = own_address(host, port).partition("%")[0]
            break
        except OSError as error:  # the name of a new machine may not resolve yet
            if time.monotonic() > deadline:
                found = error.strerror or str(error)
                raise UnavailableError(f"a route to the trainer at {host}", found, "Check its --advertise.") from None
            time.sleep(1.0)
    return interface_of(own)


def main() -> None:
    address, name, node, nodes, ranks, *program = sys.argv[1:]
    with exit_on_error("learner"):
        launch(address, name, int(node), int(nodes), int(ranks), program)


if __name__ == "__main__":
    main()
