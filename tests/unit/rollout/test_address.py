"""Where a replica serves and what it tells others of it: never a loopback address to another machine."""

import socket

import pytest

from polyreme.errors import ConfigError
from polyreme.registry import address_towards
from polyreme_rollout.replica import Place
from polyreme_rollout.serving import _advertised


def test_beside_redis_it_is_the_loopback() -> None:
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


def test_a_name_that_leads_nowhere_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"a way to Redis at nowhere\.invalid"):
        address_towards("redis://nowhere.invalid:6379")


@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [
        ("192.0.2.1", None, "192.0.2.1:7"),
        ("0.0.0.0", None, "127.0.0.1:7"),
        ("192.0.2.1", "proxy", "proxy:7"),
        ("0.0.0.0", "proxy:80", "proxy:80"),
    ],
)
def test_what_is_told_others(host: str, advertise: str | None, told: str) -> None:
    assert _advertised(Place(host, 0, 0, advertise), 7, "redis://127.0.0.1:6379") == told
