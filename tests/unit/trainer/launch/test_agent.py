"""A machine's agent finds the interface that the ranks must use."""

import psutil  # type: ignore[import-untyped]
import pytest

from polyreme_trainer.launch.agent import interface_towards
from support.ipv6 import needs_ipv6


@pytest.mark.parametrize("address", ["127.0.0.1:29500", pytest.param("[::1]:29500", marks=needs_ipv6)])
def test_the_interface_towards_an_address_has_that_address(address: str) -> None:
    host = address.rpartition(":")[0].strip("[]")
    assert host in {each.address for each in psutil.net_if_addrs()[interface_towards(address)]}
