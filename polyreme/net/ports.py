"""Ports for processes that bind them a moment later.

Kept here: they lie below those that the kernel gives to outgoing connections, so that none of these takes one in between; not even a
client of ours that goes on trying to reach it, which would be connected to itself.
"""

import random
import socket
from contextlib import suppress

from polyreme.errors import ConfigError

_FIRST, _LAST, _TRIES = 20_000, 29_999, 200


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine's address `host` that nobody listens at now. Raises ConfigError: there is hardly one."""
    draw = random.SystemRandom()  # processes with one seed must not all draw the same
    for _ in range(_TRIES):
        port = draw.randint(_FIRST, _LAST)
        with suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return port
    raise ConfigError(f"a free port between {_FIRST} and {_LAST} on {host}", f"none in {_TRIES} tries", "End what holds them.")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether no process listens at the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does: connections that have ended do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
