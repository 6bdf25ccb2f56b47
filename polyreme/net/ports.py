"""Chooses free ports for processes that bind them later.

Invariant: the ports lie below the kernel's range for outgoing connections, so that no connection takes one before its process binds it;
not even a client that retries on the port, which would otherwise connect to itself.
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
