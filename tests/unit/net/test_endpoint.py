"""The bound and the advertised address of a server: another machine never gets a loopback address."""

import socket

import pytest

from polyreme.errors import ConfigError
from polyreme.net.endpoint import address_towards, endpoint_of
from polyreme.net.ports import free_port
from support.ipv6 import needs_ipv6


def test_on_the_machine_of_redis_it_is_the_loopback() -> None:
    for url in ("redis://127.0.0.1:6379", "redis://localhost:6379/0", "unix:///tmp/redis.sock"):
        assert address_towards(url) == "127.0.0.1"


def test_towards_another_machine_it_is_the_interface_that_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(socket.socket):
        def connect(self, address: object) -> None:
            assert address == ("192.0.2.7", 6400)

        def getsockname(self) -> tuple[str, int]:
            return "192.0.2.99", 1

    monkeypatch.setattr(socket, "socket", Probe)
    assert address_towards("redis://:secret@192.0.2.7:6400/3") == "192.0.2.99"


def test_an_unknown_host_name_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        address_towards("redis://nowhere.invalid:6379")
    assert "nowhere.invalid" in caught.value.expected


REDIS = "redis://127.0.0.1:6379"


@pytest.mark.parametrize(
    ("host", "advertise", "redis", "told"),
    [
        (None, None, None, ("127.0.0.1:7", "127.0.0.1:8")),
        (None, None, REDIS, ("127.0.0.1:7", "127.0.0.1:8")),
        ("192.0.2.1", None, REDIS, ("192.0.2.1:7", "192.0.2.1:8")),
        ("0.0.0.0", None, REDIS, ("127.0.0.1:7", "127.0.0.1:8")),
        ("0.0.0.0", None, None, (f"{socket.gethostname()}:7", f"{socket.gethostname()}:8")),
        ("192.0.2.1", "proxy", REDIS, ("proxy:7", "proxy:8")),
        ("0.0.0.0", "proxy:80", REDIS, ("proxy:80", "proxy:8")),
        (None, "proxy:80", None, ("proxy:80", "proxy:8")),
        ("::1", None, None, ("[::1]:7", "[::1]:8")),
        ("::1", None, REDIS, ("[::1]:7", "[::1]:8")),
        ("::", "2001:db8::5", None, ("[2001:db8::5]:7", "[2001:db8::5]:8")),
        ("::", "[2001:db8::5]", None, ("[2001:db8::5]:7", "[2001:db8::5]:8")),
        ("::", "[2001:db8::5]:80", None, ("[2001:db8::5]:80", "[2001:db8::5]:8")),
    ],
)
def test_the_advertised_address(host: str | None, advertise: str | None, redis: str | None, told: tuple[str, str]) -> None:
    endpoint = endpoint_of(host, 0, 0, advertise, redis)
    assert (endpoint.grpc_address(7), endpoint.http_address(8)) == told


@pytest.mark.parametrize("advertise", ["proxy:http", "proxy:70000", "[::1]:-1"])
def test_a_port_that_is_none_is_refused(advertise: str) -> None:
    with pytest.raises(ConfigError) as caught:
        endpoint_of("192.0.2.1", 0, 0, advertise, None)
    assert caught.value.found == advertise


@needs_ipv6
def test_on_the_machine_of_redis_with_ipv6_it_is_the_ipv6_loopback() -> None:
    assert address_towards("redis://[::1]:6379") == "::1"


@needs_ipv6
def test_a_free_port_of_ipv6_can_be_bound() -> None:
    with socket.socket(socket.AF_INET6) as bound:
        bound.bind(("::1", free_port("::1")))
