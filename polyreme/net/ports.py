"""Ports and the loopback address, in addresses and for processes that bind them later.

Invariant: free ports lie below the kernel's range for outgoing connections, so that no connection takes one before its process
binds it; not even a client that retries on the port, which would otherwise connect to itself.
"""

import errno
import random
import resource
import socket

from polyreme.errors import ConfigError

_FIRST, _LAST, _TRIES = 20_000, 29_999, 200
_MOST_CONNECTIONS = 8192
_LOOPBACK = ("127.0.0.1", "::1")


def affordable_connections() -> int:
    """Three quarters of the files that the process may open, at most 8192."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(8, min(_MOST_CONNECTIONS, soft * 3 // 4))


def join(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def loopback() -> str:
    """This machine's loopback address: 127.0.0.1, or ::1 where there is no IPv4. Raises ConfigError when it has none."""
    found = []
    for host in _LOOPBACK:
        try:
            with _socket(host, socket.SOCK_DGRAM) as probe:  # it sends nothing
                probe.bind((host, 0))
                probe.connect(probe.getsockname())  # fails where the interface is down, although the address can be bound
            return host
        except OSError as error:
            found.append(f"{host}: {error.strerror or error}")
    raise ConfigError(
        f"a loopback interface with {' or '.join(_LOOPBACK)}, through which the processes of a run connect",
        f"none ({'; '.join(found)})",
        "Start it: `ip link set lo up`; in a sandbox or container, allow it.",
    )


def free_port(host: str | None = None) -> int:
    """A port of this machine's `host` (default: loopback) on which no process listens. Raises ConfigError when it finds none."""
    draw = random.SystemRandom()  # processes with the same seed must not draw the same ports
    host = host or loopback()
    for _ in range(_TRIES):
        port = draw.randint(_FIRST, _LAST)
        try:
            with _socket(host) as probe:
                probe.bind((host, port))
            return port
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(
                    f"an address {host} of this machine", error.strerror or str(error), "Check the network interfaces: `ip addr`."
                ) from None
    raise ConfigError(
        f"a free port between {_FIRST} and {_LAST} on {host}", f"none in {_TRIES} tries", "Stop the processes that use them."
    )


def _socket(host: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)


def check_free(host: str, port: int) -> None:
    """Raises ConfigError when a process listens at this machine's address `host` and port."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind) as probe:
        # As servers do; otherwise closed connections would block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"a free port {port} on {host}",
                error.strerror or str(error),
                "Choose another port, or stop the process that uses it.",
            ) from None


def is_free(port: int, host: str | None = None) -> bool:
    """Whether no process listens at the port of `host` (default: loopback) now."""
    try:
        check_free(host or loopback(), port)
    except ConfigError:
        return False
    return True
