"""Ports, in addresses and for processes that bind them later.

Invariant: free ports lie below the kernel's range for outgoing connections, so that no connection takes one before its process binds it;
not even a client that retries on the port, which would otherwise connect to itself.
"""

import random
import socket
from contextlib import suppress

from polyreme.errors import ConfigError

_FIRST, _LAST, _TRIES = 20_000, 29_999, 200


def join(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine's address `host` on which no process listens. Raises ConfigError when it finds none."""
    draw = random.SystemRandom()  # processes with the same seed must not draw the same ports
    for _ in range(_TRIES):
        port = draw.randint(_FIRST, _LAST)
        with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, port))
            return port
    raise ConfigError(
        f"a free port between {_FIRST} and {_LAST} on {host}", f"none in {_TRIES} tries", "Stop the processes that use them."
    )


def check_free(host: str, port: int) -> None:
    """Raises ConfigError when a process listens at this machine's address `host` and port."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do; otherwise closed connections would block the port
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"a free port {port} on {host}",
                error.strerror or str(error),
                "Choose another port, or stop the process that uses it.",
            ) from None


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether no process listens at the port now."""
    try:
        check_free(host, port)
    except ConfigError:
        return False
    return True
