"""Free ports and ports in use."""

import socket

import pytest

from polyreme.errors import ConfigError
from polyreme.net.ports import check_free, free_port


def test_a_free_port_is_free() -> None:
    check_free("127.0.0.1", free_port())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use(host: str) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        with pytest.raises(ConfigError, match=f"a free port {port} on {host}"):
            check_free(host, port)
