"""The address that a server binds and the address that others use: the same options and rule for every service.

Invariant: a wildcard or loopback address is never advertised to another machine; an IPv6 address before a port is in brackets.
"""

import socket
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]
import typer

from polyreme.errors import ConfigError
from polyreme.net.ports import join, loopback

_WILDCARDS = ("0.0.0.0", "::")

Host = Annotated[
    str | None,
    typer.Option(
        help="Address to serve on. Default: this machine's address towards Redis, or loopback without --redis.",
        show_default=False,
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="gRPC port. 0: any free port.")]
HttpPort = Annotated[int, typer.Option(min=0, max=65535, help="HTTP port. 0: any free port.")]
Advertise = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        help="Address at which the trainer reaches the gRPC port, if it differs from the served one (proxy).",
    ),
]


@dataclass(frozen=True)
class Endpoint:
    """The addresses of a server.

    Attributes:
        host: the address to bind.
        port: port of gRPC; 0 takes a free one.
        http_port: port of HTTP; 0 takes a free one; None: no HTTP.
        advertise: host, or host:port of gRPC, at which others reach the server, if it differs from `host`.
    """

    host: str = field(default_factory=loopback)
    port: int = 0
    http_port: int | None = 0
    advertise: str | None = None

    def grpc_address(self, port: int) -> str:
        """host:port at which others reach gRPC, which is served at `port`."""
        given = _parts(self.advertise)[1] if self.advertise else None
        return join(self._reached, port if given is None else given)

    def http_address(self, port: int) -> str:
        """host:port at which others reach HTTP, which is served at `port`."""
        return join(self._reached, port)

    @property
    def names(self) -> tuple[str, ...]:
        """The names or addresses by which others may call the server."""
        return tuple({self.host, self._reached})

    @property
    def _reached(self) -> str:
        return _parts(self.advertise)[0] if self.advertise else self.host


def _parts(address: str) -> tuple[str, int | None]:
    """Host and port of `host`, `host:port`, `::1`, `[::1]` or `[::1]:port`. Raises ConfigError for an invalid port."""
    if address.count(":") > 1 and not address.startswith("["):
        return address, None
    try:
        parts = urlsplit(f"//{address}")
        return parts.hostname or "", parts.port
    except ValueError:
        raise ConfigError("HOST[:PORT] for --advertise, an IPv6 address in brackets", address, "Fix --advertise.") from None


def endpoint_of(host: str | None, port: int, http_port: int | None, advertise: str | None, redis_url: str | None) -> Endpoint:
    """The endpoint that a command's options describe.

    Args:
        redis_url: Redis of the served run, or None.

    Raises:
        ConfigError: there is no route to Redis, or `advertise` is not HOST[:PORT].
    """
    if advertise:
        _parts(advertise)
    interface = address_towards(redis_url) if redis_url else None
    host = host or interface or loopback()
    if host in _WILDCARDS:
        advertise = advertise or interface or socket.gethostname()
    return Endpoint(host, port, http_port, advertise)


def address_towards(redis_url: str) -> str:
    """This machine's address towards Redis, which is 127.0.0.1 on Redis' machine. Raises ConfigError when there is no route."""
    redis = urlsplit(redis_url)
    host, port = redis.hostname or loopback(), redis.port or 6379
    try:
        return own_address(host, port)
    except OSError as error:
        raise ConfigError(f"a route to Redis at {host}", error.strerror or str(error), "Check --redis.") from None


def own_address(host: str, port: int) -> str:
    """The address of this machine's interface towards `host`. Raises OSError when there is no route."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = min(found, key=lambda each: each[0] != socket.AF_INET)  # IPv4 is preferred
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket sends nothing here
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the network interface with one of this machine's addresses, such as "lo". Raises ValueError: none has it."""
    plain = address.partition("%")[0]
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == plain for each in found):
            return str(name)
    raise ValueError(f"expected a network interface with the address {address}; found none")


def is_loopback(address: str) -> bool:
    """Whether a numeric host or host:port is a loopback address."""
    return address.startswith(("127.", "::1", "[::1]"))
