"""Refuses requests that a web page of others makes through a user's browser, to an HTTP port without a token.

Two ways lead there. A page can resolve its own name to this address (DNS rebinding) and then reads answers as its own: such a
request names the page's host in `Host`. A page can also call this address as it is; its browser then names the page in `Origin`.

Invariant: a request is answered only if every `Host` is an address in digits, a loopback name, or a name of this service, and its
`Origin`, if any, is on this machine or the called host. An address in digits is never refused: no page has one as its name.
"""

import ipaddress
import os
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import Scope

HOSTS = "POLYREME_HOSTS"
"""Further names of a service, separated by commas: those of a proxy, an ingress or a DNS server."""


def own_names(given: Iterable[str]) -> frozenset[str]:
    """The names of a service in lower case: those `given`, the machine's own, and those in the environment variable HOSTS."""
    listed = os.environ.get(HOSTS, "").split(",")
    return frozenset(name for each in (*given, socket.gethostname(), *listed) if (name := _plain(each)))


def refusal(scope: Scope, names: frozenset[str]) -> tuple[int, str] | None:
    """Status and message for a request that must not be answered; None for any other."""
    headers = list(scope.get("headers", ()))
    hosts = [_host(f"//{value.decode('latin-1')}") for name, value in headers if name == b"host"]
    for host in hosts:
        if not (_is_number(host) or _is_loopback_name(host) or host in names):
            known = ", ".join(sorted({"localhost", *names}))
            return 421, (
                f"expected one of this service's names in `Host` ({known}) or its address in digits; found {host!r}. "
                f"If {host!r} is a name of this service, add it to {HOSTS} where it starts; a service with a token "
                "(security.token_env) takes any."
            )
    for origin in (value.decode("latin-1") for name, value in headers if name == b"origin"):
        host = _host(origin)
        if not (host in hosts or host in names or _is_loopback_name(host) or (_is_number(host) and _is_loopback_number(host))):
            return 403, (
                f"expected no request of another web page; found one of {origin!r}. "
                f"Add its host to {HOSTS}, or set security.token_env, which then protects this service instead."
            )
    return None


def _host(url: str) -> str:
    """The host of a URL, in lower case; the whole text, such as the origin `null`, if it has none."""
    try:
        return _plain(urlsplit(url).hostname or "") or url
    except ValueError:
        return url


def _plain(name: str) -> str:
    return name.strip().strip("[]").lower().removesuffix(".")


@lru_cache(1024)  # a client names the same host in each request
def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_loopback_number(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _is_loopback_name(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost")
