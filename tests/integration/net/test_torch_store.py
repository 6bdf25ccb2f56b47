"""torch's store is reached only where its clients look for it."""

import importlib
import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from polyreme.errors import PolyremeError
from polyreme.net.endpoint import own_address
from polyreme.net.ports import free_port
from polyreme.net.torch_store import listening, narrow_stores
from support.ipv6 import needs_ipv6


def listeners(port: int) -> set[str]:
    """The local addresses, as the kernel writes them, at which a process listens on the port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for words in map(str.split, lines):
                if words[1].endswith(f":{port:04X}") and words[3] == "0A":
                    found.add(words[1].partition(":")[0])
    return found


@pytest.fixture
def module() -> SimpleNamespace:
    found = SimpleNamespace(TCPStore=dist.TCPStore)
    narrow_stores(found)
    narrow_stores(found)  # a second call changes nothing
    return found


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "0100007F"), ("localhost", "0100007F"), pytest.param("::1", f"{0:024X}01000000", marks=needs_ipv6)],
)
def test_a_store_of_one_machine_listens_on_loopback_alone(module: SimpleNamespace, host: str, expected: str) -> None:
    port = free_port()
    server = module.TCPStore(host_name=host, port=port, world_size=2, is_master=True, timeout=timedelta(seconds=60),
                             multi_tenant=True, wait_for_workers=False)  # fmt: skip
    assert listeners(port) == {expected}
    client = module.TCPStore(host, port, 2, False, timedelta(seconds=60))
    server.set("key", "value")
    assert client.get("key") == b"value"


def test_of_several_machines_it_listens_on_the_address_between_them() -> None:
    own = own_address("192.0.2.1", 1)  # towards any other machine
    with listening("192.0.2.1", 0) as found:
        assert found.getsockname()[0] == own
        with pytest.raises(PolyremeError) as caught:
            listening("192.0.2.1", found.getsockname()[1])
        assert caught.value.exit_code == 1, "a restart may find a free port"


def test_a_start_by_the_environment_uses_it(module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks of a learner do."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the attribute of this name is a function
    monkeypatch.setattr(rendezvous, "TCPStore", module.TCPStore)
    port = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    store, rank, size = next(rendezvous.rendezvous("env://"))
    assert (rank, size, listeners(port)) == (0, 1, {"0100007F"})
    with socket.create_connection(("127.0.0.1", port), 60):
        store.set("key", "value")
