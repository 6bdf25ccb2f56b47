"""One network device for all process groups of gloo in a process.

gloo gives each group a device of its own, whose thread wakes a hundred times a second. A learner's rank has about twenty groups,
an engine a dozen: on two cores, with answers of five tokens, their threads took about 4% of an iteration.

Invariant: groups keep their own connections and deadlines. A device belongs to its creating process, since a fork has no threads.
"""

import os
from typing import Any

_SHARED = "polyreme_devices"


def share_gloo_device(gloo: Any) -> None:
    """Makes groups that are created later share a device, in this process and in its forks.

    Args:
        gloo: the class torch.distributed.ProcessGroupGloo, which this package does not import.
    """
    if hasattr(gloo, _SHARED):
        return
    devices: dict[int, list[Any]] = {}  # by process
    create = gloo.__init__

    def init(self: object, store: object, rank: int, size: int, timeout: object) -> None:
        options = gloo._Options()
        options._devices = devices.get(os.getpid()) or devices.setdefault(os.getpid(), _devices(gloo))
        options._threads = 2 * len(options._devices)  # as gloo's default
        options._timeout = timeout
        create(self, store, rank, size, options)

    gloo.__init__ = init
    setattr(gloo, _SHARED, devices)


def _devices(gloo: Any) -> list[Any]:
    """As gloo's default: those of the interfaces in GLOO_SOCKET_IFNAME, or the one of the host's name."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in names.split(",")]
