"""Unit tests start no server and leave no running process. Tests that need one are in tests/integration, under the same name."""

import socket
from typing import NoReturn

import pytest

_WHERE = "a unit test starts no server: this one belongs into tests/integration"


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that listens on a socket."""

    def refuse(*_: object) -> NoReturn:
        pytest.fail(_WHERE)

    monkeypatch.setattr(socket.socket, "listen", refuse)


@pytest.fixture(scope="session")
def redis_url() -> NoReturn:
    pytest.fail(_WHERE)
