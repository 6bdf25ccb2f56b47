"""Fixtures of the runs over several machines."""

from collections.abc import Iterator

import pytest

from support.machines import Network, missing, network


@pytest.fixture
def net() -> Iterator[Network]:
    """Machines as network namespaces of this kernel."""
    if reason := missing():
        pytest.skip(f"network namespaces are not to be had: {reason}")
    with network() as net:
        yield net
