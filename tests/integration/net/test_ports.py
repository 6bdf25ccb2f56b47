"""Free ports and ports in use."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from polyreme.errors import ConfigError
from polyreme.net.ports import check_free, free_port
from support.ipv6 import needs_ipv6


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


def elsewhere(prepare: str, code: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python code in a network of its own, whose loopback interface `prepare` sets up."""
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("only root can create a network")
    shell = f'{prepare} && exec "$0" -c "$1"'
    return subprocess.run(
        ["unshare", "-n", "sh", "-c", shell, sys.executable, code], capture_output=True, text=True, timeout=300, check=False
    )


def test_without_a_loopback_interface_the_error_names_it() -> None:
    code = "from polyreme.net.ports import free_port; free_port()"
    said = elsewhere("true", code).stderr
    assert "expected a loopback interface" in said and "127.0.0.1: " in said and "::1: " in said and "ip link set lo up" in said


ONLY_IPV6 = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo"
SERVES = """
import asyncio, pathlib, tempfile
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.store import connect
from polyreme.net.endpoint import Endpoint, address_towards, interface_of
from polyreme.net.ports import loopback

async def ping(url):
    async with await connect(url) as client:
        assert await client.ping()

with tempfile.TemporaryDirectory() as folder, EmbeddedServer.start(pathlib.Path(folder)) as server:
    asyncio.run(ping(server.url))
    print(loopback(), Endpoint().host, address_towards(server.url), interface_of(loopback()))
"""


@needs_ipv6
def test_with_ipv6_alone_a_run_finds_its_redis() -> None:
    done = elsewhere(ONLY_IPV6, SERVES)
    assert done.stdout.split() == ["::1", "::1", "::1", "lo"], done.stderr
